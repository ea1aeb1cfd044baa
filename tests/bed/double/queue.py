"""MemoryQueue stands where a SyncQueue would: the same calls and answers, and no server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from prelay_queue.errors import QueueError, QueueFull
from prelay_queue.keys import Keys
from prelay_queue.scripts import Call, Scripts
from prelay_queue.settings import QueueSettings

from .data import Partition
from .scripts import Execution

R = TypeVar("R")


def server_ms() -> int:
    """A clock as servers have it."""
    return time.time_ns() // 1_000_000


class MemoryQueue:
    """One partition in memory. Safe to share between threads: a call runs alone, as a script does.

    `clock` gives the server's time in ms. `full` is a server over its memory limit, `away` one that does not answer.
    """

    def __init__(self, settings: QueueSettings | None = None, clock: Callable[[], int] = server_ms) -> None:
        self.settings = settings or QueueSettings("memory://", fleet="double")
        self.keys = Keys(self.settings.fleet, self.settings.partition)
        self.scripts = Scripts(self.keys)
        self.clock = clock
        self.data = Partition()
        self.full = False
        self.away: QueueError | None = None
        self._lock = threading.Lock()

    def run(self, call: Call[R]) -> R:
        """Run one script call. Raise QueueFull, or what `away` says."""
        assert call.prefix == self.keys.prefix, "a call for another partition"
        with self._lock:
            if self.away is not None:
                raise self.away
            if self.full and call.name == "submit":
                raise QueueFull("over its memory limit")
            now_ms = self.clock()
            self.data.expire(now_ms)
            return call.decode(Execution(self.data, self.keys, now_ms).run(call))

    def run_many(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Run calls in order. What is refused of one is returned in its place; when the server is away, raise."""
        answers: list[Any] = []
        for call in calls:
            try:
                answers.append(self.run(call))
            except QueueFull as error:
                answers.append(error)
        return answers

    def close(self) -> None:
        """There is nothing to close."""


class AsyncMemoryQueue:
    """The same partition for asyncio, in the place of an AsyncQueue."""

    def __init__(self, queue: MemoryQueue) -> None:
        self.settings, self.keys, self.scripts = queue.settings, queue.keys, queue.scripts
        self._queue = queue

    async def run(self, call: Call[R]) -> R:
        return self._queue.run(call)

    async def aclose(self) -> None:
        """There is nothing to close."""
