"""The ASGI app: routes, and every error in OpenAI's shape."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from prelay_files.errors import FileMissing, FileTooLarge, StorageFailed
from prelay_queue import __version__
from prelay_queue.errors import QueueBusy, QueueError, QueueFull, QueueUnavailable
from prelay_text.errors import RequestError

from . import description
from .access import RequireKey
from .admission import on_busy
from .errors import BodyTooLarge, Closing
from .local import LocalAdmin
from .metrics import count_refusal
from .outcome import CLOSING, FULL, INTERNAL, UNAVAILABLE, Failure, refused
from .replies import failed
from .routes import admin, batches, completions, dead, files, health, metrics, models, streams, tokenize
from .service import Service, service_of
from .unserved import reason

log = logging.getLogger("prelay.api")

_DESCRIPTION = "LLM serving from a queue. OpenAI's completions and chat; a preempted answer goes on as if nothing was."

#: What is beyond a limit of a file, to status and code.
_TOO_LARGE = {"bytes": (413, "file_too_large"), "lines": (400, "too_many_lines"), "line_bytes": (400, "line_too_long")}


def create_app(service: Service) -> FastAPI:
    """Build the app around `service`, which starts and stops with it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            service.begin_closing()
            service.tell()
            await service.stop()

    app = FastAPI(
        title="Prelay", description=_DESCRIPTION, version=__version__, lifespan=lifespan, redirect_slashes=False
    )
    app.state.service = service
    app.add_middleware(HeadIsGet)
    if service.config.api_keys:
        app.add_middleware(RequireKey, keys=service.config.api_keys)
    else:
        app.add_middleware(LocalAdmin)
    for part in (completions, streams, tokenize, files, batches, models, health, metrics, admin, dead):
        app.include_router(part.router)
    _add_handlers(app)
    description.describe(app, service.config)
    return app


class HeadIsGet:
    """Answers HEAD, which load balancers ask with, as GET; the server leaves the body out.

    But not of a stream: whoever reads one watches it, and ends it by leaving as the last.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD" and not scope["path"].startswith(streams.PREFIX):
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


def _add_handlers(app: FastAPI) -> None:
    """Each error becomes an answer; only the last of them is a fault of ours."""

    async def on_refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        _count(request, error)
        return failed(refused(error))

    async def on_too_large(_: Request, error: Exception) -> Response:
        return failed(Failure(413, str(error), "invalid_request_error", "request_too_large"))

    async def on_file_too_large(_: Request, error: Exception) -> Response:
        assert isinstance(error, FileTooLarge)
        status, code = _TOO_LARGE[error.what]
        return failed(Failure(status, str(error), "invalid_request_error", code, "file"))

    async def on_file_missing(_: Request, error: Exception) -> Response:
        return failed(Failure(404, str(error), "invalid_request_error", "not_found"))

    async def on_storage_failed(_: Request, error: Exception) -> Response:
        log.error("%s", error)
        return failed(Failure(507, "the server's disk does not take it: it is full, or refuses", code="storage_failed"))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        match error.status_code:
            case 404:
                return _no_such_path(request)
            case 405:
                return _wrong_method(request)
            case status:
                return failed(Failure(status, str(error.detail), "invalid_request_error"), error.headers)

    async def on_full(request: Request, error: Exception) -> Response:
        _count(request, error)
        return failed(FULL)

    async def on_unavailable(request: Request, error: Exception) -> Response:
        _count(request, error)
        return failed(UNAVAILABLE)

    async def on_closing(_: Request, __: Exception) -> Response:
        return failed(CLOSING)

    async def on_too_many(request: Request, error: Exception) -> Response:
        _count(request, error)
        return await on_busy(request, error)

    async def on_gone(_: Request, __: Exception) -> Response:
        return Response(status_code=400)  # the client has left; nobody reads it

    async def on_fault(_: Request, __: Exception) -> Response:
        return failed(INTERNAL)

    app.add_exception_handler(RequestError, on_refused)
    app.add_exception_handler(BodyTooLarge, on_too_large)
    app.add_exception_handler(FileTooLarge, on_file_too_large)
    app.add_exception_handler(FileMissing, on_file_missing)
    app.add_exception_handler(StorageFailed, on_storage_failed)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(QueueFull, on_full)
    app.add_exception_handler(QueueBusy, on_too_many)
    app.add_exception_handler(QueueUnavailable, on_unavailable)
    app.add_exception_handler(QueueError, on_fault)
    app.add_exception_handler(Closing, on_closing)
    app.add_exception_handler(ClientDisconnect, on_gone)
    app.add_exception_handler(Exception, on_fault)


def _count(request: Request, error: Exception) -> None:
    """Only what asks for an answer of the model is a request to the metrics."""
    if request.scope["path"] in ("/v1/completions", "/v1/chat/completions"):
        count_refusal(service_of(request).metrics, error)


def _no_such_path(request: Request) -> Response:
    """The path is read from the scope: request.url is built with the Host header, which may be anything."""
    path = request.scope["path"]
    if why := reason(path):
        return failed(Failure(404, why, "invalid_request_error", "not_served"))
    return failed(Failure(404, f"no such path: {path[:200]}", "invalid_request_error", "unknown_path"))


def _wrong_method(request: Request) -> Response:
    """Allow names the methods of all routes of the path."""
    allowed = [method for method in ("GET", "POST", "PUT", "PATCH", "DELETE") if _takes(request, method)]
    allow = ", ".join(["HEAD", *allowed] if "GET" in allowed else allowed)
    message = f"{request.method} is not allowed here, but {allow}"
    return failed(Failure(405, message, "invalid_request_error", "method_not_allowed"), {"allow": allow})


def _takes(request: Request, method: str) -> bool:
    scope = {**request.scope, "method": method}
    return any(route.matches(scope)[0] is Match.FULL for route in request.app.router.routes)
