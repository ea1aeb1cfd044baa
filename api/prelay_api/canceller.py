"""Cancels jobs whose viewer has gone, until Redis has answered each time."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from prelay_queue.client import AsyncQueue
from prelay_queue.errors import QueueError, QueueUnavailable

from .tasks import end, keep_running

log = logging.getLogger("prelay.cancel")

#: Cancels on their way at the same time: two thousand clients may leave at once.
WIDTH = 4


class Canceller:
    """`put` returns at once and cannot be interrupted, so it is safe in the `finally` of a cancelled request."""

    def __init__(self, queue: AsyncQueue) -> None:
        self._queue = queue
        self._waiting: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self._later: set[asyncio.TimerHandle] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [keep_running(f"cancel {n}", self._run) for n in range(WIDTH)]

    def put(self, job: str, attachment: str, after_s: float = 0.0) -> None:
        """Detach `attachment` from `job`, `after_s` seconds from now; the job ends when it was the last."""
        if after_s <= 0:
            self._waiting.put_nowait((job, attachment))
            return

        def due() -> None:
            self._later.discard(timer)
            self._waiting.put_nowait((job, attachment))

        timer = asyncio.get_running_loop().call_later(after_s, due)
        self._later.add(timer)

    @property
    def lingering(self) -> bool:
        """Whether some jobs are still watched for clients that may come back."""
        return bool(self._later)

    async def stop(self, timeout_s: float) -> None:
        """Send what waits, for at most `timeout_s`. What is to wait longer is left to the sweep of dead processes."""
        for timer in self._later:
            timer.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._waiting.join()
        await end(*self._tasks)

    async def _run(self) -> None:
        while True:
            job, attachment = await self._waiting.get()
            try:
                await self._cancel(job, attachment)
            except QueueError as error:
                log.error("cancel %s: %s", job, error)
            finally:
                self._waiting.task_done()

    async def _cancel(self, job: str, attachment: str) -> None:
        delay = 0.1
        while True:
            try:
                await self._queue.run(self._queue.scripts.cancel(job, attachment))
                return
            except QueueUnavailable:
                await asyncio.sleep(delay)
                delay = min(2 * delay, 1.0)
