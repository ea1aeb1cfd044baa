"""Public faults of schedulers, as tests: jobs that evict each other, that starve, that wait behind a batch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from prelay_queue.job import Priority
from prelay_queue.keys import GROUP
from prelay_queue.scripts import text
from prelay_worker.config import NullModel, Role
from tests.bed.chain import Stream, stream
from tests.bed.http import client_of
from tests.bed.processes import until
from tests.bed.servers import Server
from tests.faults.crowd import DIVERGENT, Crowd, Site, body, site
from tests.faults.fleet import NULL, Client, NullFleet, null_fleet
from tests.faults.forked import ApiProcess
from tests.faults.traffic import COMPLETIONS


@pytest.fixture
def fleet(shared_server: Server) -> Iterator[NullFleet]:
    with null_fleet(shared_server, null=replace(NULL, divergent=True)) as found:
        yield found


def number(fleet: NullFleet, client: Client, field: str) -> int:
    return int(fleet.redis.hget(fleet.keys.job(client.id), field) or 0)


def state(fleet: NullFleet, client: Client) -> str:
    return text(fleet.redis.hget(fleet.keys.job(client.id), "st") or "")


def states(fleet: NullFleet, clients: list[Client]) -> list[str]:
    return [state(fleet, client) for client in clients]


def preempts(fleet: NullFleet, clients: list[Client]) -> list[int]:
    return [number(fleet, client, "pe") for client in clients]


# --- memory for one and a half


def test_two_jobs_that_need_more_than_half_of_the_pool_do_not_evict_each_other(fleet: NullFleet) -> None:
    """Case 5, vllm#25538: two requests of which each needs 60 % of the pool preempt each other and never end.

    The one submitted later gives way, and the first is left alone; both end within three times what they take in turn.
    """
    fleet.null = replace(fleet.null, step_ms=15)
    fleet.start(Role.PREFILL)
    fleet.start(Role.DECODE, blocks=20)
    fleet.until_ready()
    size = {"prompt": 6, "max_tokens": 42}  # 12 of 20 blocks
    begun = time.monotonic()
    fleet.submit(1, **size)
    fleet.until_done()
    alone_s = time.monotonic() - begun
    begun = time.monotonic()
    first, second = (fleet.submit(1, **size)[0] for _ in range(2))
    fleet.until_done()
    assert time.monotonic() - begun < 3 * 2 * alone_s
    assert number(fleet, first, "pe") == 0
    assert 1 <= number(fleet, second, "pe") <= 3
    fleet.finish()


# --- starvation


def test_a_long_batch_job_ends_while_urgent_ones_never_stop_coming(fleet: NullFleet) -> None:
    """Case 6, vllm#41951: a stream of short urgent requests, and a long one of low priority never ends.

    Only a few evictions are allowed; then it needs the whole pool at once, of which the urgent ones always use some.
    """
    fleet.null = replace(fleet.null, step_ms=10)
    fleet.start(Role.PREFILL, patience_s=0.5)
    fleet.start(Role.DECODE, blocks=24, max_running=4, patience_s=0.5)
    fleet.until_ready()
    (slow,) = fleet.submit(1, prompt=6, max_tokens=90, priority=Priority.BATCH)  # all 24 blocks
    urgent: list[Client] = []

    def keep_busy() -> None:
        nonlocal urgent
        urgent = [client for client in urgent if state(fleet, client) != "done"]
        while len(urgent) < 40:  # of different lengths, so that they do not all end at once
            urgent += fleet.submit(1, max_tokens=fleet.chance.randint(4, 18), priority=Priority.INTERACTIVE)

    fleet.nudge = keep_busy
    fleet.until_done(clients=[slow])
    assert len(fleet.clients) > 70, "nothing stood in its way"
    assert number(fleet, slow, "pe") <= 3
    fleet.nudge = lambda: None
    fleet.finish()


# --- an urgent request behind a batch

#: Of a short answer. One that waits for a slot takes more than eight.
ANSWER_S = 4.0


class Classed(Crowd):
    """Clients whose requests say their class."""

    def __init__(self, api: ApiProcess, priority: Priority, count: int, max_tokens: int, first: int = 0) -> None:
        self.priority = priority
        super().__init__(api.url, count, max_tokens, first)

    async def _read(self, url: str) -> list[BaseException | Stream]:
        async with client_of(url) as client:
            asked = ({**body(prompt, self.max_tokens), "priority": self.priority} for prompt in self.prompts)
            reading = (
                stream(client, COMPLETIONS, each, found) for each, found in zip(asked, self.streams, strict=True)
            )
            return await asyncio.gather(*reading, return_exceptions=True)


def running(here: Site) -> int:
    return sum(text(here.redis.hget(here.keys.job(job), "st") or "") == "decode" for job in leased(here))


def leased(here: NullFleet) -> list[str]:
    found: Any = here.redis.zrange(here.keys.leases, 0, -1)
    return [text(job) for job in found]


@pytest.mark.parametrize("roles", [(Role.PREFILL, Role.DECODE), (Role.UNIFIED,)], ids=["two workers", "one worker"])
def test_an_urgent_request_does_not_wait_for_a_batch_that_fills_every_slot(
    shared_server: Server, roles: tuple[Role, ...]
) -> None:
    """Case 7, vllm#45561: all slots are taken by requests of low priority, and an urgent one waits for one of them.

    There is memory for all, so no scheduler that evicts only for memory makes room. The batch ends, and right.
    """
    with site(shared_server, null=replace(DIVERGENT, step_ms=25)) as here:
        here.serve(*roles, max_running=4)
        api = here.api()
        batch = Classed(api, Priority.BATCH, 4, max_tokens=320)
        here.crowds.append(batch)
        until(lambda: running(here) == 4)
        asked = time.monotonic()
        urgent = Classed(api, Priority.INTERACTIVE, 1, max_tokens=10, first=500)
        here.crowds.append(urgent)
        until(lambda: urgent.done, 20, every_s=0.01)
        assert time.monotonic() - asked < ANSWER_S
        assert not any(found.done for found in batch.streams), "a slot was free"
        assert len(here.check_crowds()) == 5
        evicted = [int(here.redis.hget(key, "pe") or 0) for key in here.redis.keys(here.keys.job("*"))]
        assert sum(evicted) == 1
        here.check_nothing_left()


def stage(fleet: NullFleet, worker_faults: str = "") -> list[Client]:
    """A prefill worker full of batch jobs that wait for a decode worker; there is none."""
    fleet.start(Role.PREFILL, worker_faults, blocks=8)
    fleet.until_ready()
    clients = fleet.submit(4, prompt=8, max_tokens=12, priority=Priority.BATCH)
    until(lambda: states(fleet, clients) == ["staged"] * 4)
    return clients


def test_an_urgent_prompt_does_not_wait_for_staged_batch_jobs(fleet: NullFleet) -> None:
    """Case 7 on the prefill side: its pool is full of prefilled batch jobs, and nobody takes them.

    The latest of them is given back. When a decode worker comes, all of them end.
    """
    clients = stage(fleet)
    (urgent,) = fleet.submit(1, prompt=8, max_tokens=12, priority=Priority.INTERACTIVE)
    until(lambda: state(fleet, urgent) == "staged")
    assert preempts(fleet, clients) == [0, 0, 0, 1]
    fleet.start(Role.DECODE)
    fleet.finish()


def test_a_staged_job_that_is_claimed_while_it_is_asked_back_is_left_to_who_claimed_it(fleet: NullFleet) -> None:
    """The same, and a decode worker claims the victim at that very moment: it reads the KV, so that is not freed."""
    clients = stage(fleet, "preempt.before=pause:2")
    victim = clients[-1]
    (urgent,) = fleet.submit(1, prompt=8, max_tokens=12, priority=Priority.INTERACTIVE)
    until(lambda: state(fleet, urgent) == "prefill")  # claimed; the worker is about to ask the victim back
    scripts, other = fleet.queue.scripts, "other:1:a"
    place: Any = fleet.redis.hmget(fleet.keys.job(victim.id), "sk", "si")
    stream_, entry = map(text, place)
    fleet.redis.xgroup_create(stream_, GROUP, id="0", mkstream=True)
    reply: Any = fleet.redis.xreadgroup(GROUP, other, {stream_: ">"}, count=len(clients))
    handed = [text(found) for _, entries in reply for found, _ in entries]
    assert entry in handed
    assert fleet.queue.run(scripts.claim(stream_, entry, victim.id, other, 60_000)).code == "ok"
    worker = fleet.workers[0]
    until(lambda: f"{victim.id}@1 makes room" in worker.log)
    asked = time.monotonic()
    until(lambda: time.monotonic() - asked > 2.5)  # it was refused by now
    assert (state(fleet, victim), number(fleet, victim, "pe")) == ("adopting", 0)
    assert state(fleet, urgent) == "prefill", "nothing was freed under the reader"
    assert fleet.queue.run(scripts.adopt(victim.id, 1, other)) == "ok"
    until(lambda: state(fleet, urgent) == "staged")
    assert preempts(fleet, clients) == [0, 0, 0, 0]
    assert fleet.queue.run(scripts.preempt(victim.id, 1, other, "test")) == "ok"
    fleet.start(Role.DECODE)
    fleet.finish()


# --- preempted again and again


def test_jobs_preempted_one_to_ten_times_end_right_and_no_more_often(shared_server: Server) -> None:
    """Case 22, vllm-gaudi#541: a request that is preempted several times has wrong tokens, or never ends."""
    with null_fleet(shared_server, null=NullModel(step_ms=10, divergent=True)) as fleet:
        fleet.start(Role.PREFILL, blocks=1024)
        fleet.start(Role.DECODE, blocks=1024)
        fleet.until_ready()
        clients = fleet.submit(10, max_tokens=300)  # long enough for ten preempts on a busy machine
        wanted = {client.id: times for times, client in enumerate(clients, start=1)}

        def preempt() -> None:
            for client in clients:
                view = fleet.view(client)
                due = view.state == "decode" and view.epoch <= wanted[client.id] and len(view.ids) > 4 * view.epoch
                if due:
                    fleet.queue.run(fleet.queue.scripts.evict(client.id))

        fleet.nudge = preempt
        fleet.until_done()
        assert preempts(fleet, clients) == list(range(1, 11))
        assert [fleet.view(client).epoch for client in clients] == list(range(2, 12))
        fleet.finish()
