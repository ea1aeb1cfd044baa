"""Any process may put right what nobody looks after; this is the API's part in it for batches."""

from __future__ import annotations

import asyncio
import logging
import random
import time

from prelay_files.errors import FilesError
from prelay_queue.errors import QueueError

from .batches import Batches
from .tasks import end, keep_running

log = logging.getLogger("prelay.batches")

#: How often is looked for batches that nobody runs, seconds.
LOOK_S = 5.0
#: A batch whose runner was not heard of for so long after its lease, or that nobody took up, gets a new job, ms.
STALE_MS = 5_000
#: How often the disk is compared with Redis, seconds.
COMPARE_S = 60.0


class Watchdog:
    """Every batch that is not over is run by somebody. What it does may be done by several at once."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._task: asyncio.Task[None] | None = None
        self._compare_at = 0.0  # monotonic

    def start(self) -> None:
        self._task = keep_running("batches", self._run)

    async def stop(self) -> None:
        if self._task is not None:
            await end(self._task)

    async def _run(self) -> None:
        while True:
            try:
                await self._look()
            except (QueueError, FilesError) as error:
                log.warning("batches are not looked after: %s", error)
            await asyncio.sleep(LOOK_S * random.uniform(0.8, 1.2))  # noqa: S311 - jitter

    async def _look(self) -> None:
        if time.monotonic() >= self._compare_at:
            await self._batches.open_lost()
            await self._batches.sweep()
            self._compare_at = time.monotonic() + COMPARE_S
        await self._batches.ensure_stale(STALE_MS)
