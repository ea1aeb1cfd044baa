"""Public faults around the API process, as tests: it dies at the worst moment, clocks are wrong, memory grows."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from prelay_queue.client import SyncQueue
from prelay_queue.scripts import text
from prelay_worker.config import NullModel, Role
from tests.bed.forks import Spawned
from tests.bed.http import client_of, get, post
from tests.bed.processes import Api, Fleet, Process, fleet, until, until_ready
from tests.bed.servers import Server
from tests.bed.tokenizer import make_tokenizer
from tests.faults.crowd import DIVERGENT, Crowd, Site, restarted, site
from tests.faults.fleet import TIMES
from tests.faults.traffic import COMPLETIONS

# --- the API process is killed at the moment of a preempt

#: The product's times of a preempt that nobody answers, with a lease that lets the sweeps begin soon.
PREEMPT_TIMES = replace(TIMES, preempt_grace_ms=2_000, sweep_ms=1_000)


def job_of(here: Site) -> tuple[str, dict[str, str]]:
    """The one job, by its id, and what Redis has of it."""
    (key,) = here.redis.keys(here.keys.job("*"))
    fields: Any = here.redis.hgetall(key)
    return text(key).rpartition("job:")[2], {text(name): text(value) for name, value in fields.items()}


def evict(here: Site) -> bool:
    job, fields = job_of(here)
    return fields["st"] == "decode" and bool(here.queue.run(here.queue.scripts.evict(job))[1])


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_preempt_whose_api_process_dies_over_it_is_answered_by_another_within_four_seconds(
    shared_server: Server, moment: str
) -> None:
    """Case 21: kill -9 of the API at the moment of a preempt, before or after its own answer to it.

    Another process re-queues the job (or it is re-queued already), and it runs to its one end. The client's connection
    breaks with what it has, a right beginning. That it goes on elsewhere with Last-Event-ID comes with issue 7.
    """
    with site(shared_server, times=PREEMPT_TIMES) as here:
        here.serve(Role.PREFILL, Role.DECODE)
        dying = here.api(f"relay.requeue.{moment}=die")
        other = here.api()
        time.sleep(PREEMPT_TIMES.lease_ms / 1000)  # until everybody may sweep
        crowd = here.crowd(dying, 1, max_tokens=150)
        crowd.until_streaming(1)
        until(lambda: evict(here), every_s=0.005)
        assert dying.wait(10)
        died = time.monotonic()
        until(lambda: job_of(here)[1]["ep"] == "2", 6)
        assert time.monotonic() - died < 4
        heard = crowd.outcomes()
        assert isinstance(heard[0], BaseException), "its connection should have broken"
        crowd.check_prefixes()
        ids = crowd.streams[0].choices[0].ids
        resume = int(job_of(here)[1]["rs:2"])
        assert resume >= len(ids) > 0
        until(lambda: job_of(here)[1]["st"] == "done")
        job, fields = job_of(here)
        assert (fields["fin"], fields["nx"], fields["ep"]) == ("length", "150", "2")
        assert here.check_one_end(job, 150)[: len(ids)] == ids
        assert other.code is None
        here.apis.remove(dying)
        here.ended.append(dying)
        here.check_nothing_left()


# --- clocks

SKEWS = {"api": "120", "prefill": "-120", "decode": "±120"}


@contextlib.contextmanager
def skewed(folder: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """A fleet whose processes can be started with a wrong wall clock each."""
    with fleet(server.settings(times=replace(TIMES, lease_ms=2_000)), make_tokenizer(folder / "model")) as found:
        before = os.environ.get("PYTHONPATH", "")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(Path(__file__).parent / "skewed"), before))))
        monkeypatch.setattr(Process, "start", Spawned)
        yield found


def with_clock(monkeypatch: pytest.MonkeyPatch, skew_s: str) -> None:
    monkeypatch.setenv("SKEW_S", skew_s)


def clock_of(api: Api) -> int:
    """What an API process takes for the time."""
    found: int = post(api.url + COMPLETIONS, json={"model": "null", "prompt": [1], "max_tokens": 1}).json()["created"]
    return found


def owned_by(found: Fleet, worker: Process) -> set[str]:
    """The jobs that a worker has a lease of."""
    queue = SyncQueue(found.queue)
    try:
        jobs = map(text, queue.redis.zrange(queue.keys.leases, 0, -1))
        owners = {job: text(queue.redis.hget(queue.keys.job(job), "ow") or "") for job in jobs}
    finally:
        queue.close()
    return {job for job, owner in owners.items() if owner.split(":")[1:2] == [str(worker.pid)]}


def reaped(found: Fleet) -> list[str]:
    """The jobs whose leases ended, as the sweeps of all processes say."""
    lines = re.findall("sweep: reaped (.*)", "\n".join(process.log for process in found.processes))
    return [job for line in lines for job in line.split(", ")]


@pytest.mark.slow
def test_wall_clocks_that_are_two_minutes_wrong_have_no_effect(
    shared_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """resque#1480: leases and heartbeats by the clients' clocks expire what lives, or keep what is dead.

    The API is two minutes ahead, the prefill worker behind, and the clock of the decode workers jumps between both.
    Jobs are preempted and a worker is killed meanwhile, so that grace times, leases and sweeps all count.
    """
    null = replace(DIVERGENT, step_ms=10)
    with skewed(tmp_path, shared_server, monkeypatch) as found:
        with_clock(monkeypatch, SKEWS["prefill"])
        found.worker(Role.PREFILL, null=null)
        with_clock(monkeypatch, SKEWS["decode"])
        decoders = [found.worker(Role.DECODE, null=null, blocks=60) for _ in range(2)]
        with_clock(monkeypatch, SKEWS["api"])
        api = found.api()
        until_ready(api.url)
        assert 115 < clock_of(api) - time.time() < 125, "the clock is not wrong"
        workers = get(f"{api.url}/admin/workers").json()["workers"]
        assert all(0 <= worker["age_ms"] < 4_000 for worker in workers), workers
        crowd = Crowd(api.url, 10, max_tokens=260)
        crowd.until_streaming(4)
        decoders[0].send(signal.SIGSTOP)
        hit = owned_by(found, decoders[0])
        decoders[0].kill()
        streams = crowd.check()
        crowd.close()
        assert hit <= set(reaped(found)), "the dead worker's jobs"
        assert set(reaped(found)) <= hit, "a living worker's jobs were taken from it"
        assert sum(map(restarted, streams)) > len(hit), "nothing was preempted"
        assert all("Traceback" not in process.log for process in found.processes)


# --- many small jobs

#: A round of jobs, each a choice of a request; how many a request has, and how many requests there are at a time.
ROUND, CHOICES, WIDTH = 2_000, 10, 8


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a site takes."""

    redis_bytes: int
    keys: int
    rss: dict[str, int]
    files: dict[str, int]


def footprint(here: Site, server: Server) -> Footprint:
    processes = {repr(process): psutil.Process(process.pid) for process in here.processes}
    processes["redis"] = psutil.Process(server.pid)
    return Footprint(
        server.client.info("memory")["used_memory"],
        server.client.dbsize(),
        {name: process.memory_info().rss for name, process in processes.items()},
        {name: process.num_fds() for name, process in processes.items()},
    )


async def ask_all(url: str, first: int) -> None:
    """One round, `WIDTH` requests at a time."""
    numbers = iter(range(first, first + ROUND // CHOICES))

    async def ask(client: httpx.AsyncClient) -> None:
        for n in numbers:
            request = {"model": "null", "prompt": [n % 1000, n // 1000, 5], "max_tokens": 2, "n": CHOICES}
            reply = await client.post(COMPLETIONS, json=request)
            assert reply.status_code == 200, reply.text
            assert [choice["finish_reason"] for choice in reply.json()["choices"]] == ["length"] * CHOICES

    async with client_of(url) as client:
        await asyncio.gather(*(ask(client) for _ in range(WIDTH)))


def forget_what_ended(here: Site) -> int:
    """Let the time of what is kept for a while go by, and return how many jobs there were. Nothing is kept for ever."""
    jobs, kept = here.redis.keys(here.keys.job("*")), here.redis.keys(here.keys.log("*"))
    with here.redis.pipeline(transaction=False) as pipe:
        for key in (*jobs, *kept):
            pipe.pttl(key)
        lives = pipe.execute()
        assert all(0 < life <= 300_000 for life in lives)
        for key in (*jobs, *kept):
            pipe.pexpire(key, 0)
        pipe.execute()
    return len(jobs)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_thousand_small_jobs_leave_no_trace(own_server: Server) -> None:
    """safe-decoder#329: a little is kept of each job, in the server, in shared memory, in some process.

    The first of eleven rounds is not counted: what is made once is made in it.
    """
    with site(own_server, null=NullModel(step_ms=0.5)) as here:
        here.serve(Role.PREFILL, Role.DECODE, blocks=2048, max_running=512)
        api = here.api()
        shm = {path.name for path in Path("/dev/shm").glob("prelay*")}
        before: Footprint | None = None
        for n in range(11):
            asyncio.run(ask_all(api.url, n * ROUND // CHOICES))
            here.until_free()
            assert forget_what_ended(here) == ROUND
            before = before or footprint(here, own_server)
        after = footprint(here, own_server)
        assert before is not None
        print(before, after, sep="\n")
        assert after.keys <= before.keys
        assert after.redis_bytes < before.redis_bytes + 500_000
        opened = {name: after.files[name] - files for name, files in before.files.items()}
        assert max(opened.values()) < 16, opened  # connections of a pool are opened when they are first needed
        growth = {name: after.rss[name] - rss for name, rss in before.rss.items()}
        assert max(growth.values()) < 10_000_000, growth  # 500 bytes a job
        mine = tuple(f"_{process.pid}_" for process in here.processes)
        new = {path.name for path in Path("/dev/shm").glob("prelay*")} - shm
        assert not [name for name in new if any(pid in name for pid in mine)]
        here.check_nothing_left()
