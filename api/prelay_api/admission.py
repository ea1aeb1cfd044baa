"""When an API process takes no new requests: Redis is nearly full (503), or as much waits as may wait (429).

What waits is counted in Redis and decided in `submit` itself, so that no two processes can give away the same place.
The memory is looked at from outside once a second; at its limit `submit` is refused by the server in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import Any

from redis.exceptions import RedisError
from starlette.requests import Request
from starlette.responses import Response

from prelay_queue.client import AsyncQueue
from prelay_queue.errors import QueueBusy, QueueFull
from prelay_queue.server import nearly_full

from .outcome import Failure
from .replies import failed
from .tasks import end, keep_running

#: The server's memory is looked at this often, seconds.
LOOK_S = 1.0


class MemoryWatch:
    """Keeps at hand whether Redis has memory for new work."""

    def __init__(self, queue: AsyncQueue) -> None:
        self._queue = queue
        self._task: asyncio.Task[None] | None = None
        self._nearly_full = False

    def start(self) -> None:
        self._task = keep_running("memory", self._run)

    async def stop(self) -> None:
        if self._task is not None:
            await end(self._task)

    def check(self) -> None:
        """Raise QueueFull while the server is so full that it should only drain."""
        if self._nearly_full:
            raise QueueFull("Redis is near its memory limit (maxmemory) and takes no new work")

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(RedisError):  # the reader says that it is away
                memory: dict[str, Any] = await self._queue.redis.info("memory")
                self._nearly_full = nearly_full(int(memory["used_memory"]), int(memory.get("maxmemory", 0)))
            await asyncio.sleep(LOOK_S)


def busy(error: QueueBusy) -> Failure:
    """What a client is told whose class has no place left."""
    after_s = max(1, math.ceil(error.retry_ms / 1000))
    message = f"{error}; try again in {after_s} s"
    kind = "tokens" if error.kind == "tokens" else "requests"  # OpenAI's words for what is limited
    return Failure(429, message, kind, "rate_limit_exceeded", retry_after_s=after_s)


async def on_busy(_: Request, error: Exception) -> Response:
    assert isinstance(error, QueueBusy)
    return failed(busy(error))
