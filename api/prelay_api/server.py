"""The HTTP server of one API process: its socket, and an end in which no stream is cut silently."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from .errors import StartupError
from .protocol import protocol_with
from .service import Service

log = logging.getLogger("prelay.api")

#: Connections that wait to be accepted.
BACKLOG = 2048
#: An idle connection is kept so long, seconds: longer than load balancers and clients keep theirs (up to 60), so that
#: it is they who close it. Closed by us, it may be just when they send the next request on it.
KEEP_ALIVE_S = 75


def bind(host: str, port: int, *, share: bool = False) -> socket.socket:
    """Bind and return the socket; port 0 takes any. Raise StartupError, one line, when that cannot be.

    `share` with other processes that do: the system deals new connections out among them.
    """
    if not 0 <= port <= 65535:
        raise StartupError(f"port {port} is not from 0 to 65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise StartupError(f"host {host!r} is not an address of this machine: {error}") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise StartupError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    """The URL at which the socket is reached from this machine."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn, but SIGTERM and SIGINT let open requests end, and then tell those that are left that the server closes.

    uvicorn alone would wait for streams to end by themselves, and then die by the signal it got.
    """

    def __init__(self, app: FastAPI, service: Service, grace_s: int) -> None:
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http=protocol_with(service.config.body_timeout_s),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(service.config.drain_s) + grace_s,
        )
        super().__init__(config)
        self._service = service

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle the signals in the loop, so that the handler may touch what the loop owns."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._close, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _close(self, number: int) -> None:
        """The first signal takes no new requests, and drains; the second tells the open ones; more cut them off."""
        again, drain_s = self.should_exit, self._service.config.drain_s
        self.force_exit = self._service.told and number == signal.SIGINT
        self.should_exit = True
        self._service.begin_closing()
        if again or not drain_s:
            self._service.tell()
        else:
            log.info("told to stop: %d open requests may go on for %g s", len(self._service.sessions), drain_s)
            asyncio.get_running_loop().call_later(drain_s, self._service.tell)
