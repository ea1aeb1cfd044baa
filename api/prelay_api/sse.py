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

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from prelay_queue import failpoints
from prelay_text.render import DONE, Part, comment, frame

from .choice import Choice
from .outcome import INTERNAL, failure
from .session import Session

log = logging.getLogger("prelay.sse")

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def frames(session: Session, keep_alive_s: float) -> AsyncGenerator[bytes, None]:
    """Yield the frames of a stream, each when the one before was taken, up to [DONE]; comments into silence.

    Tokens go into the assembler only here, so what waits while a client does not read counts as undelivered.
    """
    render = session.renderer
    for choice in session.choices:
        if (first := render.first_chunk(choice.index, choice.spec.prompt_ids, session.usage_so_far)) is not None:
            yield frame(session.cursor(), first)
    while True:
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
        if not await session.wait(keep_alive_s):
            yield comment("keep-alive")
    if render.include_usage:
        yield frame(session.cursor(), render.usage_chunk(session.usage))
    yield DONE


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
    if part.text:
        yield frame(session.cursor(), render.text_chunk(choice.index, part, session.usage_so_far))
        part = Part("")
    choice.told_end = True
    last = render.finish_chunk(choice.index, choice.finish_reason, part, session.usage_so_far)
    yield frame(session.cursor(), last)


class EventStream(Response):
    """Sends the frames of a session and closes it, at once when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, session: Session, headers: dict[str, str], keep_alive_s: float) -> None:
        super().__init__(headers={**_HEADERS, **headers})
        del self.headers["content-length"]  # of the empty body that Response assumes
        self._session = session
        self._keep_alive_s = keep_alive_s

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
            async with aclosing(frames(self._session, self._keep_alive_s)) as all_frames:
                async for data in all_frames:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception:
            log.exception("the stream of %r failed", self._session)
            last = frame(None, INTERNAL.body) + DONE
            await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def client_gone(receive: Receive) -> None:
    """Return when the client has left. Only after the request's body was read to its end."""
    while (await receive())["type"] != "http.disconnect":
        pass
