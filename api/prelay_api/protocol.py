"""HTTP/1.1 as uvicorn speaks it, with the limits and the manners that it lacks.

uvicorn takes heads of any size, waits for ever for a request that has begun, tells only the last of several pipelined
requests that its client has left, and answers what it cannot parse in plain text. Here a request's head has a limit,
a request has to arrive in time, everybody hears of a client that leaves, and each refusal is OpenAI's error object.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import socket
import sys
from typing import Any, NoReturn

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from .http10 import until_the_close
from .outcome import Failure

#: A request's line and headers together, bytes; the trailers of a chunked body count on their own.
MAX_HEAD_BYTES = 64 * 1024
#: Header fields of one request.
MAX_HEAD_FIELDS = 256
#: Requests that may wait in one connection behind the one that is answered; with so many it is not read on.
MAX_PIPELINED = 16
#: So many can only come in one piece, and are refused.
TOO_MANY_PIPELINED = 256
#: A body that comes at least so fast, bytes a second, may take as long as it needs.
MIN_BODY_RATE = 16 * 1024
#: After a refusal so many seconds are left to the client to read it; what it sends meanwhile is thrown away. Closed
#: at once, a connection on which data still comes is reset, and the answer is lost with it.
LINGER_S = 2.0

#: What the system keeps for a client beyond what is on its way to it, bytes. By itself it keeps megabytes of the text
#: for one who does not read: that would count as delivered, and nobody would notice that the client takes nothing.
MAX_UNSENT_BYTES = 32 * 1024

_TOO_MUCH_HEAD = Failure(
    431,
    f"the request's line and headers have more than the {MAX_HEAD_BYTES} bytes that are taken",
    "invalid_request_error",
    "headers_too_large",
)
_TOO_MANY_FIELDS = Failure(
    431,
    f"the request has more than the {MAX_HEAD_FIELDS} header fields that are taken",
    "invalid_request_error",
    "headers_too_large",
)
_TOO_MANY_REQUESTS = Failure(
    400,
    f"more than {TOO_MANY_PIPELINED} requests were sent without waiting for an answer",
    "invalid_request_error",
    "too_many_pipelined",
)
_NO_PROXY = Failure(400, "this server is no proxy: CONNECT is not served", "invalid_request_error", "invalid_http")


class HttpProtocol(HttpToolsProtocol):
    """One connection. `read_timeout_s` is the time that a request has to arrive in, from first byte to last.

    A body gets a second more for each MIN_BODY_RATE bytes of it that have come.
    """

    read_timeout_s: float = 60.0

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._serving: RequestResponseCycle | None = None
        self._refusal: Failure | None = None  # why a callback stops the parser
        self._refused = False
        self._begun = False  # a part of a request is here, and not all of it
        self._in_head = False
        self._fields = self._head_bytes = 0
        self._unparsed = 0  # bytes since the parser last had a whole something
        self._late: asyncio.TimerHandle | None = None
        self._waits_since_s = 0.0  # by the loop's clock
        self._body_bytes = 0
        self._piece = b""  # what is being parsed
        self._upgrading = False

    # --- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _keep_little_unsent(transport.get_extra_info("socket"))
        self._wait_for_the_rest()

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever is being answered hears of it, also when other requests wait behind."""
        self._stop_waiting()
        super().connection_lost(exc)
        self._abandon()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._late is None and not self._answering:
            self._wait_for_the_rest()
        self._unparsed += len(data)
        self._piece = data
        super().data_received(data)
        self._piece = b""
        # The parser gathers a field's value by itself, and says nothing before its end. What came in one read with
        # the beginning of a chunk is not counted.
        if self._unparsed > MAX_HEAD_BYTES and not self._refused:
            self._refuse(_TOO_MUCH_HEAD)

    # --- the parser's callbacks; what they raise ends in `send_400_response`

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begun = self._in_head = True
        self._fields = self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        if self._fields > MAX_HEAD_FIELDS:
            self._stop(_TOO_MANY_FIELDS)
        self._count_head(len(name) + len(value))
        if self._in_head:  # trailers come when the headers were read already: nobody may be told by them
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                self._stop(_NO_PROXY)
            self._upgrading = True
            return
        self._in_head, self._head_bytes, self._unparsed = False, 0, 0
        super().on_headers_complete()
        if len(self.pipeline) > TOO_MANY_PIPELINED:
            self._stop(_TOO_MANY_REQUESTS)
        if len(self.pipeline) < MAX_PIPELINED:  # a client that leaves is only heard while reading
            self.flow.resume_reading()

    def on_chunk_header(self) -> None:
        self._unparsed = 0

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._upgrading:
            return
        self._begun, self._unparsed = False, 0
        self._stop_waiting()
        super().on_message_complete()

    # --- answers

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._serving = cycle
        if cycle.scope["http_version"] == "1.0":
            app = until_the_close(app, cycle)
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this where the parser has raised."""
        error = sys.exception()
        ours = isinstance(error, httptools.HttpParserCallbackError)
        words = f"the request is not valid HTTP/1.1: {msg if error is None or ours else error}"
        self._refuse(self._refusal or Failure(400, words, "invalid_request_error", "invalid_http"))

    def _unsupported_upgrade_warning(self) -> None:
        """uvicorn calls this where a client has asked for another protocol, h2c for example, as Java's own does.

        The parser has left the request's body aside, as if it were of that protocol. The client only offered: the
        request is parsed again as if it had not.
        """
        error = sys.exception()
        assert isinstance(error, httptools.HttpParserUpgrade)
        self._upgrading = False
        head = [self.parser.get_method(), b" ", self.url, f" HTTP/{self.parser.get_http_version()}\r\n".encode()]
        head += [part for name, value in self.headers if name != b"upgrade" for part in (name, b": ", value, b"\r\n")]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        super().data_received(b"".join([*head, b"\r\n", self._piece[error.args[0] :]]))

    @property
    def _answering(self) -> bool:
        return self._serving is not None and not self._serving.response_complete

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            self._stop(_TOO_MUCH_HEAD)

    def _stop(self, why: Failure) -> NoReturn:
        self._refusal = why
        raise ValueError(why.message)

    def _refuse(self, why: Failure) -> None:
        """Answer in place of the app, and end the connection: nothing that follows can be read as a request.

        An answer that is being sent is cut instead: within it a second one would be taken for a part of it.
        """
        if self._refused:
            return
        self._refused = True
        self._stop_waiting()
        self._unset_keepalive_if_required()
        in_answer = self._serving is not None and self._serving.response_started and self._answering
        self._abandon()
        if in_answer or self.transport.is_closing():
            self.transport.close()
            return
        self.transport.write(_encode(why))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(LINGER_S, self.transport.close)

    def _abandon(self) -> None:
        """Tell the request that is being answered that its client has left."""
        if self._serving is not None and self._answering:
            self._serving.disconnected = True
            self._serving.message_event.set()

    # --- time

    def _wait_for_the_rest(self) -> None:
        self._waits_since_s = self.loop.time()
        self._body_bytes = 0
        self._late = self.loop.call_later(self.read_timeout_s, self._on_late)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _time_left_s(self) -> float:
        """What the client has left. While it is we who do not read, its time stands still."""
        if self.flow.read_paused and self._begun and not self._in_head:
            return self.read_timeout_s
        waited_s = self.loop.time() - self._waits_since_s
        return self.read_timeout_s + self._body_bytes / MIN_BODY_RATE - waited_s - 0.01

    def _on_late(self) -> None:
        self._late = None
        if (left_s := self._time_left_s()) > 0:
            self._late = self.loop.call_later(left_s, self._on_late)
            return
        answered = self._serving is not None and self._serving.response_started
        if not self._begun or (answered and not self._in_head):
            self.transport.close()  # nothing was asked, or it was answered without the rest
            return
        part = "headers" if self._in_head else "body"
        waited_s = self.read_timeout_s + self._body_bytes // MIN_BODY_RATE
        message = f"the request's {part} did not arrive within {waited_s:g} seconds"
        self._refuse(Failure(408, message, "invalid_request_error", "request_timeout"))


def protocol_with(read_timeout_s: float) -> type[HttpProtocol]:
    """The protocol with this limit, as uvicorn takes it: a class."""
    return type("HttpProtocol", (HttpProtocol,), {"read_timeout_s": read_timeout_s})


def _keep_little_unsent(connection: socket.socket) -> None:
    """Let the system take no more of what is written than it can soon send. Not every system can be told so."""
    with contextlib.suppress(OSError, AttributeError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)


def _encode(why: Failure) -> bytes:
    """A whole answer, after which the connection ends."""
    head = (
        f"HTTP/1.1 {why.status} {http.HTTPStatus(why.status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(why.body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + why.body
