"""POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from prelay_queue.errors import SentBefore
from prelay_text.parameters import Route
from prelay_text.request import ChatRequest, CompletionRequest
from prelay_text.schema import request_schema
from prelay_text.validate import chat_request, completion_request

from ..answer import collect
from ..body import understand
from ..deadline import with_deadline
from ..idempotency import Sent, another_body, sent_under
from ..outcome import CLOSING, Failure
from ..replies import failed, json_reply
from ..service import Service, service_of
from ..session import Session
from ..sse import EventStream, lingers

router = APIRouter(tags=["OpenAI"])


def _documented(route: Route, example: dict[str, Any]) -> dict[str, Any]:
    """The request body for the OpenAPI page: read from the one table of parameters."""
    schema = request_schema(route)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema, "example": example}}}}


def _answers(name: str) -> dict[int | str, dict[str, Any]]:
    """What is answered, for the OpenAPI page, which has a schema of this name and one of its chunks."""
    words = (
        f"The answer as JSON, or with `stream` as server-sent events: each has a {name}Chunk as its data,"
        " or an Error that ends the answer, and the last one [DONE]."
    )
    whole = {"schema": {"$ref": f"#/components/schemas/{name}"}}
    found = {"description": words, "content": {"application/json": whole, "text/event-stream": {}}}
    return {200: found, **_REFUSALS}


_REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"description": "A parameter is wrong: the message names it, its limit and its value."},
    404: {"description": "The model is not served here."},
    422: {"description": "The Idempotency-Key was sent before with another body."},
    413: {"description": "The body is too large."},
    429: {"description": "As much of this class waits as may wait; Retry-After says when there should be room."},
    503: {"description": "The queue is full or does not answer; Retry-After says when to try again."},
    504: {"description": "The answer was not complete by the request's deadline."},
}


@router.post(
    "/v1/completions",
    summary="Continue a prompt",
    responses=_answers("Completion"),
    openapi_extra=_documented(Route.COMPLETION, {"model": "demo", "prompt": "The sea is", "max_tokens": 32}),
)
async def completions(request: Request) -> Response:
    """OpenAI's legacy completions, for one prompt given as text or as token ids."""
    return await _serve(request, completion_request)


@router.post(
    "/v1/chat/completions",
    summary="Answer a chat",
    responses=_answers("ChatCompletion"),
    openapi_extra=_documented(
        Route.CHAT, {"model": "demo", "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    ),
)
async def chat_completions(request: Request) -> Response:
    """OpenAI's chat completions, for text."""
    return await _serve(request, chat_request)


async def _serve(request: Request, read: Callable[[object], CompletionRequest | ChatRequest]) -> Response:
    """1 read and check, 2 submit, 3 relay. From 2 on the session is closed whatever happens."""
    service = service_of(request)
    if service.closing:
        return failed(CLOSING)

    def checked(body: object) -> tuple[CompletionRequest | ChatRequest, Sent | None]:
        return with_deadline(read(body), request.headers), sent_under(request, body)

    (wanted, sent), long = await understand(request, service.config.max_body_bytes, checked)
    session = await service.open(wanted, sent, long=long)
    try:
        await session.submit()
        return await _answer(service, session, request, stream=wanted.stream)
    except SentBefore as before:
        session.close()
        return await _answer_again(service, before, request, stream=wanted.stream)
    except BaseException:
        session.close()
        raise


async def _answer_again(service: Service, before: SentBefore, request: Request, *, stream: bool) -> Response:
    """Join the request that was sent before under the same key, or give its stored answer."""
    if not before.same:
        return failed(another_body(f"request {before.request_id}"))
    session = await service.resume(before.request_id, None)
    if isinstance(session, Failure):  # it was forgotten just now
        return failed(session)
    try:
        return await _answer(service, session, request, stream=stream)
    except BaseException:
        session.close()
        raise


async def _answer(service: Service, session: Session, request: Request, *, stream: bool) -> Response:
    headers = {"x-request-id": session.renderer.id}
    session.linger_s = lingers(request, service.config)
    if service.told:  # between our look and the submit
        service.tell_one(session)
    if stream:
        return EventStream(session, service.config)
    body = await collect(session, request.receive)
    return failed(body, headers) if isinstance(body, Failure) else json_reply(body, headers=headers)
