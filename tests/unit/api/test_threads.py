"""What runs in a thread is over when its task is."""

from __future__ import annotations

import asyncio
import threading

import pytest

from prelay_api.threads import in_thread


async def test_the_answer_and_the_error_of_a_thread_come_back() -> None:
    assert await in_thread(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)


async def test_a_task_that_is_cancelled_waits_for_its_thread() -> None:
    begun, may_end, over = asyncio.Event(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def work() -> None:
        loop.call_soon_threadsafe(begun.set)
        may_end.wait(10)
        over.set()

    task = asyncio.create_task(in_thread(work))
    await begun.wait()
    task.cancel()
    await asyncio.wait([task], timeout=0.05)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert over.is_set()
