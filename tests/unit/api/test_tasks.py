from __future__ import annotations

import asyncio
import contextlib

from prelay_api.tasks import end, keep_running


async def test_a_task_that_loses_a_cancellation_is_ended_all_the_same() -> None:
    begun = asyncio.Event()

    async def work() -> None:
        begun.set()
        with contextlib.suppress(asyncio.CancelledError):  # as wait_for of Python 3.11 does when it is done just then
            await asyncio.sleep(60)
        await asyncio.sleep(60)

    task = keep_running("deaf", work)
    await begun.wait()
    async with asyncio.timeout(10):
        await end(task)
    assert task.cancelled()


async def test_ending_nothing_ends_at_once() -> None:
    await end()
