"""A session as server-sent events.

Each frame's `id:` is the cursor after it: the log entry of each choice up to which the client has the answer. A
comment keeps a silent connection alive: it ends in one line break and rides in front of the next frame, because
clients that have seen an id take an empty line for an event without data.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from prelay_queue import failpoints
from prelay_text.render import DONE, comment, frame

from .choice import Choice
from .config import ApiConfig
from .idempotency import HEADER
from .outcome import INTERNAL, failure
from .phase import phase_of
from .session import Session

log = logging.getLogger("prelay.sse")

#: The preference (RFC 7240) of a client that will come back for its stream.
RESUMABLE = "resumable"

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def frames(session: Session, keep_alive_s: float) -> AsyncGenerator[bytes, None]:
    """Yield the frames of a stream, each when the one before was taken, up to [DONE]; comments into silence.

    Tokens go into the assembler only here, so what waits while a client does not read counts as undelivered.
    A stream that is handed on ends without [DONE]: the client is to go on with it elsewhere.
    """
    render = session.renderer
    for first in _first_frames(session):
        yield first
    while True:
        for phase in session.news():
            yield comment(phase)
        for choice in session.choices:
            if choice.relay.pending:
                await failpoints.ahit("relay.deliver")
            for data in _next_of(session, choice):
                yield data
        if (problem := session.failed()) is not None:
            yield frame(session.cursor(), problem.body)
            yield DONE
            return
        if all(choice.told_end for choice in session.choices):
            break
        if session.handed_on:
            yield comment("this process shuts down: go on with the stream elsewhere")
            return
        if not await session.wait(keep_alive_s):
            yield comment(await phase_of(session))
    if render.include_usage:
        yield frame(session.cursor(), render.usage_chunk(session.usage))
    yield DONE


def _first_frames(session: Session) -> Iterator[bytes]:
    """What comes before any text. Only the last has an id: a client that knows a place has had them all."""
    if session.begun:
        return
    session.begun = True
    chunks = [
        chunk
        for choice in session.choices
        if (chunk := session.renderer.first_chunk(choice.index, choice.form.prompt_ids, session.usage_so_far))
    ]
    for chunk in chunks[:-1]:
        yield frame(None, chunk)
    for chunk in chunks[-1:]:
        yield frame(session.cursor(), chunk)


def _next_of(session: Session, choice: Choice) -> Iterator[bytes]:
    """What one choice has to say now: text that came, and its end."""
    render = session.renderer
    part = choice.deliver()
    if part.text:
        yield frame(session.cursor(), render.text_chunk(choice.index, part, session.usage_so_far))
    end = choice.relay.end
    if end is None or choice.told_end or choice.relay.pending or failure(end):
        return
    part = choice.finish()
    choice.told_end = True
    last = render.finish_chunk(choice.index, choice.finish_reason, part, session.usage_so_far)
    yield frame(session.cursor(), last)


class EventStream(Response):
    """Sends the frames of a session and closes it, at once when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, session: Session, config: ApiConfig) -> None:
        kept = {"preference-applied": RESUMABLE} if session.linger_s else {}
        super().__init__(headers={**_HEADERS, "x-request-id": session.renderer.id, **kept})
        del self.headers["content-length"]  # of the empty body that Response assumes
        self._session = session
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        """Send all. When cancelled, or the client gone, the session's jobs are cancelled before this returns."""
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(client_gone(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._session.close()
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with aclosing(frames(self._session, self._config.keep_alive_s)) as all_frames:
                async for data in all_frames:
                    async with asyncio.timeout(self._config.stall_s):
                        await send({"type": "http.response.body", "body": data, "more_body": True})
        except TimeoutError:
            log.warning("a client took nothing for %g s: its stream is cut: %r", self._config.stall_s, self._session)
            return
        except Exception:
            log.exception("the stream of %r failed", self._session)
            last = frame(None, INTERNAL.body) + DONE
            await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def lingers(request: Request, config: ApiConfig) -> float:
    """How long the request's jobs are kept for a client that vanishes, seconds.

    Not at all unless it says that it will come back: with `Prefer: resumable`, or a key under which to ask again.
    """
    if HEADER in request.headers:
        return config.linger_s
    said = ",".join(request.headers.getlist("prefer")).split(",")  # one header line or several
    asked = (each.partition(";")[0].strip().lower() for each in said)
    return config.linger_s if RESUMABLE in asked else 0.0


async def client_gone(receive: Receive) -> None:
    """Return when the client has left. Only after the request's body was read to its end."""
    while (await receive())["type"] != "http.disconnect":
        pass
