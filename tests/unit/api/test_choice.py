from __future__ import annotations

import asyncio
import contextlib
from typing import Any, cast

import pytest

from prelay_api.choice import Choice, View
from prelay_api.hub import Hub
from prelay_queue.client import AsyncQueue
from prelay_queue.job import JobSpec, Sampling
from prelay_queue.scripts import NewJob
from prelay_queue.settings import QueueSettings
from prelay_text.assembler import Assembler


async def test_a_closed_choice_stops_relaying_though_its_cancellation_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(AsyncQueue(QueueSettings("unix:///nowhere/redis.sock", "test")))
    job = NewJob(JobSpec("r/0", (1, 2), Sampling(5)), "api#token")
    choice = Choice(hub, job, cast(Assembler, None), View(), keep_delivered=True, changed=lambda: None)
    waiting = asyncio.Event()

    async def wait() -> tuple[list[Any], bool]:
        waiting.set()
        with contextlib.suppress(asyncio.CancelledError):  # as wait_for of Python 3.11 does when it is done just then
            await asyncio.sleep(60)
        return [], False

    monkeypatch.setattr("prelay_api.subscription.Subscription.wait", lambda _: wait())
    choice.start()
    await waiting.wait()
    choice.close()
    relaying = [task for task in asyncio.all_tasks() if task.get_name() == "relay r/0"]
    _, left = await asyncio.wait(relaying, timeout=10)
    for task in left:
        task.cancel()
    assert relaying
    assert not left
    await hub.queue.aclose()
