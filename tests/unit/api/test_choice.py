from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from prelay_api.choice import Choice
from prelay_api.hub import Hub
from prelay_queue.client import AsyncQueue
from prelay_queue.job import JobSpec, Sampling
from prelay_queue.scripts import NewJob
from prelay_queue.settings import QueueSettings
from prelay_text.form import Form
from prelay_text.render import Renderer
from tests.unit.text.families import build


async def test_a_closed_choice_stops_relaying_though_its_cancellation_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(AsyncQueue(QueueSettings("unix:///nowhere/redis.sock", "test")))
    job = NewJob(JobSpec("r/0", (1, 2), Sampling(5)), "api#token")
    renderer = Renderer(chat=False, id="r", created=0, model="m", system_fingerprint="f")
    form = Form(renderer=renderer, index=0, n=1, candidates=1, prompt_tokens=2, continues=True)
    choice = Choice(hub, build("byte_level"), form, job, keep_delivered=True, changed=lambda: None)
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
