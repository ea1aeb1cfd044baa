"""The heartbeats of the fleet, read by an API process."""

from __future__ import annotations

import asyncio
import contextlib

from redis.exceptions import RedisError

from prelay_queue.client import AsyncQueue, translate
from prelay_queue.errors import QueueError
from prelay_queue.scripts import text
from prelay_text.fleet import Fleet, fleet_of
from prelay_text.resolve import Limits

from .tasks import end, keep_running

#: The limits of the fleet are looked up this often, seconds.
REFRESH_S = 1.0


async def read_fleet(queue: AsyncQueue) -> Fleet:
    """Read all heartbeats. Raise QueueError."""
    keys, redis = queue.keys, queue.redis
    try:
        names = [text(name) for name in await redis.zrange(keys.workers, 0, -1)]
        async with redis.pipeline(transaction=False) as pipe:
            pipe.time()
            for name in names:
                pipe.get(keys.worker(name))
            (seconds, micros), *beats = await pipe.execute()
    except RedisError as error:
        raise translate(error) from None
    now_ms = int(seconds) * 1000 + int(micros) // 1000
    return fleet_of(beats, now_ms)


class FleetWatch:
    """Keeps the fleet's limits at hand, so that a request need not ask for them."""

    def __init__(self, queue: AsyncQueue) -> None:
        self._queue = queue
        self._task: asyncio.Task[None] | None = None
        self.seen = Fleet()

    def start(self) -> None:
        self._task = keep_running("fleet", self._run)

    async def stop(self) -> None:
        if self._task is not None:
            await end(self._task)

    async def limits(self, context_len: int) -> Limits:
        """What a request may ask for. Looks again where no pool is known yet: the first worker may just be ready."""
        known = self.seen.limits(context_len)
        if known.pool_tokens is None:
            await self._look()
        return self.seen.limits(context_len)

    async def _run(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(REFRESH_S)

    async def _look(self) -> None:
        with contextlib.suppress(QueueError):  # the reader says that Redis is away
            found = await read_fleet(self._queue)
            # Limits of a fleet that just restarts stay known.
            self.seen = found if found.workers else self.seen
