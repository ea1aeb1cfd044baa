"""Fleets of null workers under pressure: preempts, kills and outages, with every token of every stream checked."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from prelay_queue.client import SyncQueue
from prelay_queue.settings import QueueSettings
from prelay_queue.state import State
from prelay_worker.config import NullModel, Role
from tests.bed.bound import bound
from tests.bed.chain import Listener, Stream, check_chain, check_stream, stream
from tests.bed.http import client_of, get, post
from tests.bed.processes import Fleet, Process, fast_times, fleet, until, until_ready
from tests.bed.servers import Server
from tests.bed.tokenizer import ids_of

COMPLETIONS = "/v1/completions"
DIVERGENT = NullModel(divergent=True, step_ms=3)


def body(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {"model": "null", "prompt": prompt, "max_tokens": 100, **more}


async def together(url: str, count: int, one: Callable[[httpx.AsyncClient, int], Awaitable[Any]]) -> list[Any]:
    async with client_of(url) as client:
        return await asyncio.gather(*(one(client, n) for n in range(count)))


def restarted(found: Stream) -> bool:
    """Did the answer take more than one attempt?"""
    return not found.frames[-2].id.startswith("1-")


@dataclass(frozen=True, slots=True)
class Running:
    """A job that some worker owns."""

    id: str
    state: State
    owner: str
    tokens: int


class Watch:
    """The test's own look into Redis: what runs at this moment."""

    def __init__(self, queue: SyncQueue) -> None:
        self._queue = queue

    def running(self) -> list[Running]:
        redis: Any = self._queue.redis
        keys = self._queue.keys
        found = []
        for job in redis.zrange(keys.leases, 0, -1):
            state, owner, tokens = redis.hmget(keys.job(job.decode()), "st", "ow", "nx")
            if state is not None:
                found.append(Running(job.decode(), State(state.decode()), owner.decode(), int(tokens)))
        return found

    def streaming(self, count: int) -> bool:
        """Are so many answers of 100 tokens begun and far from their end?"""
        return sum(job.state is State.DECODE and 0 < job.tokens < 60 for job in self.running()) >= count

    def freeze_at_work(self, victim: Process, state: State) -> list[str]:
        """Stop `victim` when it owns jobs in `state`, and return them; what it owns cannot change any more."""

        def caught() -> list[str]:
            if not self._owned(victim, state):
                return []
            victim.send(signal.SIGSTOP)
            if not (jobs := self._owned(victim, state)):  # it was quicker
                victim.send(signal.SIGCONT)
            return jobs

        found: list[str] = until(caught, every_s=0.005)
        return found

    def _owned(self, worker: Process, state: State) -> list[str]:
        return [job.id for job in self.running() if job.state is state and self._pid(job.owner) == worker.pid]

    def _pid(self, owner: str) -> int:
        beat: Any = self._queue.redis.get(self._queue.keys.worker(owner))
        return int(orjson.loads(beat)["pid"]) if beat else 0


@contextmanager
def watching(settings: QueueSettings) -> Iterator[Watch]:
    queue = SyncQueue(settings)
    try:
        yield Watch(queue)
    finally:
        queue.close()


async def test_streams_of_a_pool_that_is_too_small_are_never_contradicted(new_fleet: Fleet) -> None:
    # 8 answers of 110 tokens want 56 blocks of 16 tokens, the pool has 24: they are evicted again and again.
    api = new_fleet.api(faults="relay.deliver=pause:0.02@*")
    new_fleet.worker(Role.PREFILL, null=DIVERGENT)
    new_fleet.worker(Role.DECODE, null=DIVERGENT, blocks=24)
    until_ready(api.url)

    async def one(client: httpx.AsyncClient, n: int) -> Stream:
        prompt = [n, *range(9)]
        found = await stream(client, COMPLETIONS, body(prompt))
        check_stream(found, prompt, 100, divergent=True)
        return found

    streams = await together(api.url, 8, one)
    assert sum(map(restarted, streams)) >= 3


async def test_a_pool_that_is_too_small_changes_no_answer(new_fleet: Fleet) -> None:
    api = new_fleet.api()
    new_fleet.worker(Role.UNIFIED, null=NullModel(step_ms=2), blocks=24)
    until_ready(api.url)

    async def one(client: httpx.AsyncClient, n: int) -> None:
        prompt = [n, *range(9)]
        if n % 2:
            check_stream(await stream(client, COMPLETIONS, body(prompt)), prompt, 100)
        else:
            answer = (await client.post(COMPLETIONS, json=body(prompt))).json()
            ids = ids_of(answer["choices"][0]["text"])
            check_chain(prompt, ids)
            assert len(ids) == answer["usage"]["completion_tokens"] == 100

    await together(api.url, 8, one)


@pytest.mark.slow
def test_an_operator_preempts_a_stream_three_times(new_fleet: Fleet) -> None:
    api = new_fleet.api(faults="relay.deliver=pause:0.03@*")
    new_fleet.worker(Role.PREFILL, null=DIVERGENT)
    new_fleet.worker(Role.DECODE, null=DIVERGENT)
    until_ready(api.url)
    prompt = [3, 1, 4]
    client = Listener(api.url, COMPLETIONS, body(prompt, n=2, max_tokens=600))
    until(lambda: len(client.ids) >= 20)
    job = f"{api.url}/admin/jobs/{client.found.id}"
    for attempt in (1, 2, 3):
        # Ask until a worker has both choices: between the stages nobody does.
        until(lambda: _asked_all(post(f"{job}/preempt")))
        until(bound(lambda now: min(_numbers(job, "epoch")) > now, attempt))
        until(lambda: set(_numbers(job, "state")) == {"decode"})
    found = client.end(60)
    check_stream(found, prompt, 600, choices=2, divergent=True)
    assert min(_numbers(job, "preemptions")) >= 3


def _asked_all(reply: httpx.Response) -> bool:
    assert reply.status_code == 202
    return all(choice["asked"] for choice in reply.json()["choices"])


def _numbers(job: str, name: str) -> list[Any]:
    return [choice[name] for choice in get(job).json()["choices"]]


@pytest.mark.parametrize("victim", [pytest.param(Role.PREFILL, marks=pytest.mark.slow), Role.DECODE])
async def test_a_killed_worker_ends_no_stream(shared_server: Server, null_folder: Path, victim: Role) -> None:
    queue = replace(shared_server.settings(), times=fast_times())
    null = NullModel(divergent=True, step_ms=10, prefill_ms_per_token=3)
    with fleet(queue, null_folder) as found, watching(queue) as watch:
        api = found.api()
        workers = {role: found.worker(role, null=null) for role in (Role.PREFILL, Role.DECODE)}
        until_ready(api.url)
        found.worker(victim, null=null)

        async def one(client: httpx.AsyncClient, n: int) -> Stream:
            await asyncio.sleep(n * 0.05)  # so that prompts and answers are at different points
            prompt = [n, *range(20)]
            heard = await stream(client, COMPLETIONS, body(prompt))
            check_stream(heard, prompt, 100, divergent=True)
            return heard

        task = asyncio.create_task(together(api.url, 12, one))
        state = State.PREFILL if victim is Role.PREFILL else State.DECODE
        hit = await asyncio.to_thread(watch.freeze_at_work, workers[victim], state)
        workers[victim].kill()
        streams = {heard.id: heard for heard in await task}
        assert all(restarted(streams[job.partition("/")[0]]) for job in hit)


def test_a_worker_that_hangs_loses_its_jobs_and_its_late_tokens_are_refused(
    shared_server: Server, null_folder: Path
) -> None:
    queue = replace(shared_server.settings(), times=fast_times())
    null = NullModel(divergent=True, step_ms=10)
    with fleet(queue, null_folder) as found:
        api = found.api()
        first = found.worker(Role.UNIFIED, null=null)
        until_ready(api.url)
        client = Listener(api.url, COMPLETIONS, body([6, 6], max_tokens=300))
        until(lambda: len(client.ids) > 5)
        first.send(signal.SIGSTOP)
        found.worker(Role.UNIFIED, null=null)
        before = len(client.ids)
        until(lambda: len(client.ids) > before)
        first.send(signal.SIGCONT)
        check_stream(client.end(60), [6, 6], 300, divergent=True)


async def test_a_server_that_is_flushed_under_load_heals(own_server: Server, null_folder: Path) -> None:
    queue = own_server.settings()
    with fleet(queue, null_folder) as found, watching(queue) as watch:
        api = found.api()
        for role in (Role.PREFILL, Role.DECODE):
            found.worker(role, null=NullModel(step_ms=10, divergent=True))
        until_ready(api.url)

        async def one(client: httpx.AsyncClient, n: int) -> Stream:
            heard = await stream(client, COMPLETIONS, body([n]))
            check_stream(heard, [n], 100, divergent=True)
            return heard

        task = asyncio.create_task(together(api.url, 8, one))
        await asyncio.to_thread(until, lambda: watch.streaming(4))
        own_server.client.flushall()
        assert any(map(restarted, await task)), "the flush hit no running job"
        assert len(api.log.splitlines()) < 30


@pytest.mark.parametrize("outage_s", [0.0, pytest.param(3.0, marks=pytest.mark.slow)])
async def test_a_server_that_is_killed_under_load_ends_no_stream(
    own_server: Server, null_folder: Path, outage_s: float
) -> None:
    queue = own_server.settings()
    with fleet(queue, null_folder) as found, watching(queue) as watch:
        api = found.api()
        for role in (Role.PREFILL, Role.DECODE):
            found.worker(role, null=NullModel(step_ms=10, divergent=True))
        until_ready(api.url)

        async def one(client: httpx.AsyncClient, n: int) -> None:
            check_stream(await stream(client, COMPLETIONS, body([n])), [n], 100, divergent=True)

        task = asyncio.create_task(together(api.url, 8, one))
        await asyncio.to_thread(until, lambda: watch.streaming(4))
        own_server.kill()
        assert not task.done(), "the kill hit no running job"
        await asyncio.sleep(outage_s)
        own_server.start()
        await task
        assert "lost contact with Redis" in api.log


async def test_scripts_that_are_flushed_all_the_time_are_loaded_again(own_server: Server, null_folder: Path) -> None:
    with fleet(own_server.settings(), null_folder) as found:
        api = found.api()
        found.worker(Role.UNIFIED, null=NullModel(step_ms=5))
        until_ready(api.url)

        async def one(client: httpx.AsyncClient, n: int) -> None:
            check_stream(await stream(client, COMPLETIONS, body([n])), [n], 100)

        task = asyncio.create_task(together(api.url, 8, one))
        while not task.done():
            own_server.client.script_flush()
            await asyncio.sleep(0.5)
        await task
