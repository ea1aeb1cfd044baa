"""Any process may give back what nobody looks after; this is the API's part in it."""

from __future__ import annotations

import asyncio
import logging
import random

from redis.exceptions import RedisError

from prelay_queue.client import AsyncQueue
from prelay_queue.errors import QueueError
from prelay_queue.recorder import NOBODY, Recorder
from prelay_queue.sweep import say, sweep

from .contact import Contact
from .tasks import end, keep_running

log = logging.getLogger("prelay.sweep")


class Sweeper:
    """Runs `reap` about each second, but only after one full lease of uninterrupted contact with Redis.

    An outage must not expire the world: whoever holds a lease needs one lease of time to renew it first.
    """

    def __init__(self, queue: AsyncQueue, contact: Contact, recorder: Recorder = NOBODY) -> None:
        self._recorder = recorder
        self._queue = queue
        self._contact = contact
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = keep_running("sweep", self._run)

    async def stop(self) -> None:
        if self._task is not None:
            await end(self._task)

    async def _run(self) -> None:
        times = self._queue.settings.times
        while True:
            await asyncio.sleep(times.sweep_ms / 1000 * random.uniform(0.8, 1.2))  # noqa: S311 - jitter
            server_ms = self._contact.server_ms
            if self._contact.held_ms < times.lease_ms or server_ms is None:
                continue
            try:
                say(await self._queue.run(sweep(self._queue.scripts, times, server_ms)), self._recorder)
            except (QueueError, RedisError) as error:
                log.warning("sweep: %s", error)
                self._contact.lost()
