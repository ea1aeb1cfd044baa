"""Faults of worker processes: killed, frozen, slow, poisoned, restarted."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import orjson
import pytest

from prelay_queue.scripts import text
from prelay_worker.config import NullModel, Role
from tests.bed.bound import bound
from tests.bed.processes import until
from tests.bed.servers import Server
from tests.faults.fleet import NULL, TIMES, Client, NullFleet, null_fleet

DIVERGENT = replace(NULL, divergent=True)


@pytest.fixture
def fleet(shared_server: Server) -> Iterator[NullFleet]:
    with null_fleet(shared_server, null=DIVERGENT) as found:
        yield found


def states(fleet: NullFleet, clients: list[Client]) -> list[str]:
    return [fleet.view(client).state for client in clients]


def test_a_prefill_worker_killed_mid_job_costs_one_lease_and_no_token(shared_server: Server) -> None:
    with null_fleet(shared_server, null=replace(DIVERGENT, prefill_ms_per_token=50)) as fleet:
        victim = fleet.start(Role.PREFILL)
        fleet.start(Role.DECODE)
        fleet.until_ready()
        clients = fleet.submit(3, prompt=6)
        until(lambda: "prefill" in states(fleet, clients))
        victim.kill()
        killed = time.monotonic()
        fleet.until_done()
        assert time.monotonic() - killed < 15
        assert max(fleet.view(client).epoch for client in clients) == 2
        fleet.finish()


@pytest.mark.parametrize("divergent", [pytest.param(False, marks=pytest.mark.slow), True], ids=["plain", "divergent"])
def test_a_decode_worker_killed_under_many_streams_loses_none_of_them(shared_server: Server, divergent: bool) -> None:
    with null_fleet(shared_server, null=replace(NULL, divergent=divergent)) as fleet:
        fleet.start(Role.PREFILL, blocks=512)
        victim = fleet.start(Role.DECODE, blocks=2048)
        fleet.until_ready()
        clients = fleet.submit(32, max_tokens=240)  # none is over before the last has begun
        until(lambda: all(len(fleet.view(client).ids) > 5 for client in clients))
        victim.kill()
        fleet.until_done()
        assert {fleet.view(client).epoch for client in clients} <= {1, 2}
        assert any(fleet.view(client).epoch == 2 for client in clients)
        fleet.finish()


def test_a_worker_frozen_for_more_than_its_lease_is_refused_when_it_wakes(fleet: NullFleet) -> None:
    fleet.start(Role.PREFILL)
    frozen = fleet.start(Role.DECODE)
    fleet.until_ready()
    clients = fleet.submit(8, max_tokens=50)
    until(lambda: sum(len(fleet.view(client).ids) for client in clients) > 40)
    frozen.send(signal.SIGSTOP)
    fleet.start(Role.DECODE)
    until(lambda: "decode" not in states(fleet, clients) or states(fleet, clients).count("queued"), 10)
    # Nobody tells it: only the fence of its own late writes can.
    fleet.redis.delete(fleet.keys.control(frozen.id))
    fleet.finish()
    assert "stops here: fenced" in frozen.log or "stops here: done" in frozen.log
    assert frozen not in fleet.ended


def test_a_decode_worker_that_can_take_nothing_over_leaves_the_jobs_to_the_others(fleet: NullFleet) -> None:
    """It is always free, so it would be the first to claim every job again, until the job has failed too often."""
    fleet.null = replace(DIVERGENT, step_ms=5)
    fleet.start(Role.PREFILL, blocks=512)
    blind = fleet.start(Role.DECODE, "copy.before=cut@*")
    fleet.start(Role.DECODE, blocks=512, max_running=2)
    fleet.until_ready()
    clients = fleet.submit(24, max_tokens=24)
    fleet.finish()
    assert "claims nothing for 1 s: QueueUnavailable" in blind.log
    assert sum(fleet.view(client).epoch - 1 for client in clients) < 24


@pytest.mark.slow
def test_a_prefill_of_four_leases_runs_once(shared_server: Server) -> None:
    """bullmq#3183: a job that takes longer than its lock is taken for stalled, and run a second time."""
    prompt, seconds = 40, 4 * TIMES.lease_ms / 1000
    with null_fleet(shared_server, null=NullModel(prefill_ms_per_token=1000 * seconds / prompt)) as fleet:
        fleet.start(Role.PREFILL)
        fleet.start(Role.PREFILL)  # it would take it
        fleet.start(Role.DECODE)
        fleet.until_ready()
        (client,) = fleet.submit(1, prompt=prompt)
        fleet.until_done()
        assert fleet.view(client).epoch == 1
        fleet.until_free()
        assert sum(beat["computed_tokens"] for beat in fleet.status() if beat["role"] == "prefill") == prompt
        fleet.finish()


@pytest.mark.slow
def test_a_worker_whose_model_hangs_loses_its_jobs_though_its_threads_live(shared_server: Server) -> None:
    times = replace(TIMES, stall_ms=1_000)
    with null_fleet(shared_server, times=times, null=DIVERGENT) as fleet:
        hanging = fleet.start(Role.PREFILL, null=replace(DIVERGENT, prefill_ms_per_token=1_000))
        fleet.start(Role.DECODE)
        fleet.until_ready()
        clients = fleet.submit(2)
        until(lambda: "prefill" in states(fleet, clients))
        until(lambda: "queued" in states(fleet, clients))
        # It could take them again, and again; its claim thread does live.
        until(lambda: states(fleet, clients) == ["queued", "queued"])
        fleet.start(Role.PREFILL)
        fleet.until_done()
        assert max(fleet.view(client).epoch for client in clients) == 2
        fleet.check_answers()
        assert "the model loop has not moved" in hanging.log
        fleet.until_free(40)  # its step ends some time


@pytest.mark.timeout(180)
@pytest.mark.parametrize("role", [Role.PREFILL, pytest.param(Role.DECODE, marks=pytest.mark.slow)])
def test_a_poisonous_prompt_alone_is_given_up_and_its_neighbours_are_right(shared_server: Server, role: Role) -> None:
    """sidekiq#4633: a job that aborts its process is fetched again for ever, and takes its neighbours along."""
    poison = 999
    with null_fleet(shared_server, null=DIVERGENT) as fleet:
        for each in (Role.PREFILL, Role.DECODE):
            null = replace(DIVERGENT, poison_token=poison) if each is role else DIVERGENT
            fleet.start(each, blocks=512, null=null)
        fleet.until_ready()
        good = fleet.submit(16)
        (bad,) = fleet.submit(1, prompt_ids=(1, poison, 2))
        good += fleet.submit(15)
        fleet.until_done(120)
        view = fleet.view(bad)
        error = orjson.loads(view.error)
        assert (view.reason, error["code"], error["status"]) == ("error", "worker_crashed", 500)
        assert len([worker for worker in fleet.ended if worker.role is role]) == 4  # two in company, two alone
        letters: Any = fleet.redis.xrange(fleet.keys.dead)
        ((_, letter),) = letters
        assert text(letter[b"id"]) == bad.id
        for client in good:
            fleet.check_answer(client)
        fleet.until_free()
        fleet.check_nothing_left()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_fleet_in_which_somebody_dies_all_the_time_ends_each_job_once(fleet: NullFleet) -> None:
    for role in (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE):
        fleet.start(role, blocks=128)
    fleet.until_ready()
    for _ in range(10):
        clients = fleet.submit(6, max_tokens=40)
        until(bound(lambda some: any(fleet.view(client).ids for client in some), clients))  # they are on their way
        fleet.chance.choice(fleet.workers).kill()
        fleet.tend()
    fleet.until_done(100)
    assert len(fleet.ended) == 10
    fleet.finish()


@pytest.mark.slow
def test_consumers_do_not_pile_up_over_restarts_and_no_pending_entry_is_lost(fleet: NullFleet) -> None:
    fleet.start(Role.DECODE)
    for _ in range(8):
        fleet.submit(1)
        victim = fleet.start(Role.PREFILL, "claim.before=die")
        assert victim.wait(15)  # it dies with the entry in its hands
        fleet.workers.remove(victim)
        fleet.ended.append(victim)
    victim = fleet.start(Role.PREFILL)
    fleet.until_done()
    fleet.check_answers()
    # The names of the dead go when their heartbeats have, at the next start.
    until(lambda: not any(fleet.redis.exists(fleet.keys.worker(worker.id)) for worker in fleet.ended))
    victim.stop()
    fleet.tend()
    fleet.until_ready()
    until(lambda: max(consumers(fleet)) <= 2)
    fleet.finish()


def consumers(fleet: NullFleet) -> list[int]:
    return [len(fleet.redis.xinfo_consumers(stream, "g")) for stream in fleet.keys.work("prefill")]


# Two jobs too large to run together, from kv-preempt 5.


def test_two_jobs_that_each_need_most_of_the_pool_both_end_in_bounded_time(shared_server: Server) -> None:
    step_ms, tokens = 6, 100
    with null_fleet(shared_server, null=NullModel(step_ms=step_ms, divergent=True)) as fleet:
        fleet.start(Role.PREFILL)
        fleet.start(Role.DECODE, blocks=44)  # 106 tokens need 27 blocks: 61 %
        fleet.until_ready()
        started = time.monotonic()
        clients = fleet.submit(2, max_tokens=tokens)
        fleet.until_done()
        serial_s = 2 * tokens * step_ms / 1000
        grace_s = 4 * (TIMES.preempt_grace_ms + TIMES.sweep_ms) / 1000  # of unanswered preempts
        assert time.monotonic() - started < 3 * serial_s + grace_s
        assert max(int(fleet.redis.hget(fleet.keys.job(c.id), "pe") or 0) for c in clients) <= 3
        fleet.finish()
