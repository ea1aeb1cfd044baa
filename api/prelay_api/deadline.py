"""Deadlines in an API process: what a request says, what its jobs carry, and the last word where Redis says nothing.

The time runs from the request's arrival, on this process's monotonic clock; a submit hands over what is left of it, and
from then on the job's `dl` counts, on the server's clock. Whoever sees first that it has passed ends the job: a worker
between two steps, a claim, or anybody's `expire`. The relay hears it like any other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from redis.exceptions import RedisError
from starlette.datastructures import Headers

from prelay_queue.client import AsyncQueue
from prelay_queue.errors import QueueError
from prelay_queue.recorder import NOBODY, Recorder
from prelay_queue.sweep import expire, say_expired
from prelay_text.checks import show
from prelay_text.errors import RequestError
from prelay_text.parameters import MAX_DEADLINE_MS
from prelay_text.request import Request

from .session import Session
from .tasks import end, keep_running

R = TypeVar("R", bound=Request)

HEADER = "X-Deadline-Ms"
#: So long after its deadline a session that has heard nothing ends by itself, seconds: Redis may be away.
LAST_WORD_S = 0.5


def with_deadline(request: R, headers: Headers) -> R:
    """The request with the deadline that its header says, if one does. Raise RequestError."""
    return replace(request, deadline_ms=deadline_ms(headers.getlist(HEADER), request.deadline_ms))


def deadline_ms(headers: Sequence[str], body: int | None) -> int | None:
    """What headers and body agree on; None: nothing is said. Raise RequestError."""
    said = dict.fromkeys(_read(value) for value in headers)
    if body is not None:
        said[body] = None
    if len(said) > 1:
        message = f"{HEADER} and deadline_ms disagree ({', '.join(map(str, said))}): send one of them"
        raise RequestError(message, param="deadline_ms", code="invalid_value")
    return next(iter(said), None)


def _read(value: str) -> int:
    digits = value.strip()
    if digits.isascii() and digits.isdecimal() and len(digits) <= 20 and 1 <= int(digits) <= MAX_DEADLINE_MS:
        return int(digits)
    message = f"the header {HEADER} must be an integer from 1 to {MAX_DEADLINE_MS}, not {show(value)}"
    raise RequestError(message, param=HEADER, code="invalid_value")


class Deadlines:
    """The deadlines of this process's sessions, and this process's part in looking for late jobs of everybody."""

    def __init__(self, queue: AsyncQueue, recorder: Recorder = NOBODY) -> None:
        self._queue = queue
        self._recorder = recorder
        self._last_words: dict[Session, asyncio.TimerHandle] = {}
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"Deadlines({len(self._last_words)} sessions)"

    def start(self) -> None:
        self._task = keep_running("deadlines", self._run)

    async def stop(self) -> None:
        if self._task is not None:
            await end(self._task)

    def set(self, session: Session, ends_at: float) -> None:
        """Give a session that is not submitted yet its deadline: a moment of the monotonic clock, seconds."""
        for choice in session.choices:
            if choice.job is not None:
                choice.job = replace(choice.job, ends_at=ends_at)
        loop = asyncio.get_running_loop()
        after_s = max(0.0, ends_at - time.monotonic()) + LAST_WORD_S
        self._last_words[session] = loop.call_later(after_s, session.abort, session.late)

    def forget(self, session: Session) -> None:
        """The session is closed."""
        if (timer := self._last_words.pop(session, None)) is not None:
            timer.cancel()

    async def _run(self) -> None:
        every_s = self._queue.settings.times.deadline_check_ms / 1000
        while True:
            await asyncio.sleep(every_s * random.uniform(0.8, 1.2))  # noqa: S311 - jitter
            with contextlib.suppress(QueueError, RedisError):  # the reader says that Redis is away
                ended = await self._queue.run(expire(self._queue.scripts))
                say_expired(ended, self._recorder)
