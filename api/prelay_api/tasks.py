"""Background tasks that outlive a fault of their own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger("prelay.api")

#: Wait before a task that failed begins again, seconds.
AGAIN_AFTER_S = 1.0


def keep_running(name: str, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
    """Start `work`, and start it again whenever it raises: no request may wait for an ear that is gone."""

    async def run() -> None:
        while True:
            try:
                await work()
            except Exception:
                log.exception("task %s failed and begins again", name)
                await asyncio.sleep(AGAIN_AFTER_S)

    return asyncio.create_task(run(), name=name)


async def end(*tasks: asyncio.Task[None]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
