"""Public faults of queues' workers, as tests: killed, frozen, killed again and again, restarted hundreds of times."""

from __future__ import annotations

import signal
import time
from dataclasses import replace

import pytest

from prelay_queue.scripts import text
from prelay_queue.settings import QueueTimes
from prelay_worker.config import NullModel, Role
from tests.bed.bound import bound
from tests.bed.processes import until
from tests.bed.servers import Server
from tests.faults.crowd import DIVERGENT, Site, restarted, site
from tests.faults.fleet import NullFleet, null_fleet

PRODUCT = QueueTimes()


def owned_by(here: Site, worker: str, state: str) -> int:
    """How many jobs a worker owns in a state."""
    found = [
        here.redis.hmget(here.keys.job(text(job)), "st", "ow") for job in here.redis.zrange(here.keys.leases, 0, -1)
    ]
    return sum((text(st or ""), text(ow or "")) == (state, worker) for st, ow in found)


def until_owned(here: Site, worker: str, state: str, count: int) -> None:
    until(lambda: owned_by(here, worker, state) >= count)


# --- one worker dies or freezes; with the product's times


@pytest.mark.slow
def test_a_prefill_worker_killed_mid_job_costs_less_than_fifteen_seconds(shared_server: Server) -> None:
    """rq#2015: the job of a worker that was killed is stuck, or run twice. Here: the same job, its text once."""
    null = replace(DIVERGENT, prefill_ms_per_token=50)
    with site(shared_server, times=PRODUCT, null=null) as here:
        here.serve(Role.PREFILL, Role.DECODE)
        victim = here.workers[0]
        crowd = here.crowd(here.api(), 3, max_tokens=40)
        until_owned(here, victim.id, "prefill", 1)
        victim.kill()
        killed = time.monotonic()
        here.until_gone()
        assert time.monotonic() - killed < 15
        streams = here.check_crowds()
        assert any(map(restarted, streams))
        jobs = here.redis.keys(here.keys.job("*"))
        assert len(jobs) == len(crowd.streams)
        here.check_nothing_left()


def test_a_decode_worker_killed_under_thirty_two_streams_breaks_none(shared_server: Server) -> None:
    """arq#343: with the worker all of its jobs are lost."""
    with site(shared_server, null=replace(DIVERGENT, step_ms=20)) as here:
        here.serve(Role.PREFILL, Role.DECODE, blocks=2048)
        victim = here.workers[1]
        here.crowd(here.api(), 32, max_tokens=150)
        until_owned(here, victim.id, "decode", 24)
        victim.send(signal.SIGSTOP)
        hit = owned_by(here, victim.id, "decode")
        assert hit >= 16, "most had ended already"
        victim.kill()
        streams = here.check_crowds()
        assert len(streams) == 32
        assert sum(map(restarted, streams)) >= hit
        here.check_nothing_left()


@pytest.mark.slow
def test_a_decode_worker_frozen_for_fifteen_seconds_is_refused_when_it_wakes(shared_server: Server) -> None:
    """lion-reader#917: a worker that was suspended goes on with jobs that others have finished meanwhile."""
    with site(shared_server, times=PRODUCT) as here:
        here.serve(Role.PREFILL, Role.DECODE, blocks=2048)
        frozen = here.workers[1]
        api = here.api()
        crowd = here.crowd(api, 8, max_tokens=300)
        crowd.until_streaming(8)
        frozen.send(signal.SIGSTOP)
        begun = time.monotonic()
        here.workers.remove(frozen)  # or it would be continued at once
        try:
            here.serve(Role.DECODE, blocks=2048)
            here.redis.delete(here.keys.control(frozen.id))  # nobody tells it: only the fence of its late writes can
            until(lambda: time.monotonic() - begun > 15, 20)
        finally:
            here.workers.append(frozen)
            frozen.send(signal.SIGCONT)
        streams = here.check_crowds()
        assert all(map(restarted, streams))
        until(lambda: frozen.log.count("stops here: ") == 8)
        assert frozen.code is None
        for found in streams:
            here.check_one_end(f"{found.id}/0", 300)
        here.check_nothing_left()


# --- workers die all the time


@pytest.mark.timeout(240)
@pytest.mark.parametrize("seconds", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_jobs_end_once_while_a_worker_of_eight_is_killed_every_second(shared_server: Server, seconds: int) -> None:
    """taskiq-redis#123: jobs are lost, or run twice, when workers die while they take them.

    In turn any of them dies, and one that decodes.
    """
    roles, tokens = (*[Role.PREFILL] * 3, *[Role.DECODE] * 5), 150
    with site(shared_server, null=replace(DIVERGENT, step_ms=5)) as here:
        here.serve(*roles)
        api = here.api()
        begun = time.monotonic()
        for n in range(seconds):
            here.crowd(api, 6, max_tokens=tokens, first=6 * n)
            until(bound(lambda s: time.monotonic() - begun > s, n + 0.5))
            alive = [w for w in here.workers if w.id]
            busy = [w for w in alive if n % 2 and owned_by(here, w.id, "decode")]
            here.chance.choice(busy or alive).kill()
            until(bound(lambda s: time.monotonic() - begun > s, n + 1))
            here.tend()
        streams = here.check_crowds(120)
        assert len(here.ended) == seconds
        assert len(streams) == 6 * seconds
        assert sum(map(restarted, streams)) >= max(1, seconds // 6), "the kills hit nobody"
        jobs = {f"{found.id}/0" for found in streams}
        assert {text(key).rpartition("job:")[2] for key in here.redis.keys(here.keys.job("*"))} == jobs
        for job in jobs:
            here.check_one_end(job, tokens)
        here.check_nothing_left()


def consumers(fleet: NullFleet) -> int:
    """The most consumers that one work stream has."""
    streams = [key for stage in ("prefill", "decode:null") for key in fleet.keys.work(stage) if fleet.redis.exists(key)]
    return max((len(fleet.redis.xinfo_consumers(stream, "g")) for stream in streams), default=0)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("restarts", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_workers_restarted_hundreds_of_times_leave_no_consumer_and_lose_no_entry(
    shared_server: Server, restarts: int
) -> None:
    """redis#11567: consumers pile up, and XGROUP DELCONSUMER drops the entries that one of them has pending.

    Every second one dies with an entry in its hands, the others end in order.
    """
    at_once = 4
    with null_fleet(shared_server, null=NullModel(step_ms=1, divergent=True)) as fleet:
        fleet.start(Role.DECODE, blocks=512)
        most = 0
        for round_ in range(restarts // at_once):
            dies = round_ % 2 == 0
            fleet.submit(at_once, max_tokens=4)
            some = [fleet.start(Role.PREFILL, "claim.before=die" if dies else "", blocks=512) for _ in range(at_once)]
            if dies:
                until(bound(lambda some: any(worker.code is not None for worker in some), some))
            until(bound(lambda some: all(worker.id or worker.code is not None for worker in some), some))
            most = max(most, consumers(fleet))
            for worker in some:
                worker.end()
            for worker in some:
                worker.stop()
                fleet.workers.remove(worker)
                fleet.ended.append(worker)
        # No more than lived at any time in one life of a heartbeat (2 s), however many came before.
        assert most <= 60, most
        last = fleet.start(Role.PREFILL, blocks=512)
        fleet.until_done(60)
        fleet.check_answers()
        until(lambda: not any(fleet.redis.exists(fleet.keys.worker(worker.id)) for worker in fleet.ended if worker.id))
        last.stop()
        fleet.tend()
        fleet.until_ready()
        until(lambda: consumers(fleet) <= 2)
        assert len(fleet.ended) == restarts + 1
        died = sum(worker.code == -signal.SIGKILL for worker in fleet.ended)
        assert died >= restarts // (2 * at_once), died
        fleet.finish()
