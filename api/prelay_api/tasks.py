"""Background tasks that outlive a fault of their own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger("prelay.api")

#: Wait before a task that failed begins again, seconds.
AGAIN_AFTER_S = 1.0
#: A task that was cancelled and goes on is cancelled again after this long, seconds.
CANCEL_AGAIN_AFTER_S = 0.2


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
    """Cancel tasks and wait until they have ended.

    A cancellation may be lost: on Python 3.11 `asyncio.wait_for`, in which redis-py sends, drops one that arrives just
    as it is done. So whatever goes on is told again.
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=CANCEL_AGAIN_AFTER_S)
