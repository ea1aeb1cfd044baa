"""What `prelay doctor` finds left over in a real Redis, and that its advice puts it right."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prelay.doctor import fleets
from prelay.doctor.finding import Finding
from prelay.doctor.fleets import look, look_twice
from prelay.doctor.leftovers import checks
from prelay_queue.client import SyncQueue
from prelay_queue.job import JobSpec, Sampling
from prelay_queue.keys import GROUP
from prelay_queue.scripts import NewJob
from prelay_queue.settings import QueueTimes
from prelay_queue.sweep import sweep
from tests.bed.ports import free_port
from tests.bed.servers import Server
from tests.integration.test_serve_doctor import rows

CHECKS = {check.name: check.judge for check in checks.checks}
WORKER = "host:1:aa"


@pytest.fixture
def queue(own_server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[SyncQueue]:
    """A fleet with one job that waits and one that a live worker has claimed."""
    monkeypatch.setattr(fleets, "BETWEEN_S", 0.0)  # nothing moves here
    found = SyncQueue(own_server.settings())
    for stream in found.keys.work("prefill"):
        found.redis.xgroup_create(stream, GROUP, id="0", mkstream=True)
    found.run(found.scripts.beat(WORKER, {"id": WORKER}, 60_000))
    assert found.run(found.scripts.submit([job("held/0")])) == ("new",)
    claim(found, "held/0")
    assert found.run(found.scripts.submit([job("waits/0")])) == ("new",)
    yield found
    found.close()


def job(name: str) -> NewJob:
    return NewJob(JobSpec(name, (1, 2, 3), Sampling(max_tokens=5)), "api:1:a#t")


def claim(queue: SyncQueue, name: str, worker: str = WORKER) -> None:
    stream, entry = read(queue, worker)
    assert queue.run(queue.scripts.claim(stream, entry, name, worker, 60_000)).code == "ok"


def read(queue: SyncQueue, worker: str) -> tuple[str, str]:
    streams: Any = dict.fromkeys(queue.keys.work("prefill"), ">")
    answer: Any = queue.redis.xreadgroup(GROUP, worker, streams, count=1)
    ((stream, ((entry, _),)),) = answer
    return stream.decode(), entry.decode()


def found(queue: SyncQueue) -> dict[str, Finding]:
    """Every check that found something."""
    looks = look_twice(queue.redis)
    findings = {name: judge(looks) for name, judge in CHECKS.items()}
    return {name: finding for name, finding in findings.items() if finding.found != "none"}


def run_advice(queue: SyncQueue, finding: Finding, **names: str) -> None:
    """Send the command that an advice ends with, with what stands for a name in it filled in."""
    command = re.search(r"(?:ZADD|DEL|ZREM|XDEL) .*?(?= hands| forgets|$)", finding.advice)
    assert command is not None
    words = command[0].replace("'", "").split()
    for name, value in names.items():
        words = [word.replace(f"<{name}>", value) for word in words]
    assert "<" not in " ".join(words)
    queue.redis.execute_command(*words)


def reap(queue: SyncQueue) -> None:
    seconds, _ = queue.redis.time()
    queue.run(sweep(queue.scripts, QueueTimes(queued_check_ms=0), seconds * 1000))


def test_a_sound_fleet_is_read_as_it_is(queue: SyncQueue) -> None:
    assert found(queue) == {}
    (fleet,) = look(queue.redis).fleets
    assert (fleet.keys, fleet.open_jobs, fleet.workers) == (queue.keys, 2, {WORKER})
    assert {name: set(members) for name, members in fleet.indices.items()} == {
        "queued": {"waits/0"}, "leases": {"held/0"}, "preempted": set(),
    }  # fmt: skip
    assert [list(work.entries.values()) for work in fleet.work.values() if work.entries] == [["waits/0"]]


@pytest.mark.parametrize(("name", "index"), [("waits/0", "queued"), ("held/0", "leases")])
def test_a_job_that_fell_out_of_its_index_is_found_and_comes_back_as_advised(
    queue: SyncQueue, name: str, index: str
) -> None:
    queue.redis.zrem(f"{queue.keys.prefix}{index}", name)
    (finding,) = found(queue).values()
    assert finding.state == "fail"
    assert name in finding.found
    run_advice(queue, finding, index=index, id=name)
    reap(queue)
    assert found(queue) == {}
    assert queue.redis.zscore(queue.keys.queued, name) is not None, "it waits for a prefill again"


def test_a_job_whose_hash_is_gone_leaves_entries_that_are_found(queue: SyncQueue) -> None:
    queue.redis.delete(queue.keys.job("waits/0"))
    findings = found(queue)
    assert set(findings) == {"index entries without job", "work entries without job", "counts of what waits"}
    reap(queue)
    assert set(found(queue)) == {"work entries without job"}, "a sweep removes the entry of the index"
    stream, entry = read(queue, WORKER)
    assert f"as {entry} in {stream.removeprefix(queue.keys.prefix)}" in findings["work entries without job"].found
    assert queue.run(queue.scripts.claim(stream, entry, "waits/0", WORKER, 60_000)).code == "stale"
    assert found(queue) == {}, "and the next worker that reads it the other"


def test_a_consumer_of_a_dead_worker_is_found_until_the_next_one_starts(queue: SyncQueue) -> None:
    stream, entry = read(queue, "ghost:2:bb")
    (finding,) = found(queue).values()
    assert finding.items == ("ghost:2:bb (1 pending)",)
    queue.redis.xclaim(stream, GROUP, WORKER, 0, [entry])
    queue.run(queue.scripts.tidy())
    assert found(queue) == {}


def test_the_live_stream_of_a_dead_api_is_found_when_it_falls_silent_and_when_it_stays(queue: SyncQueue) -> None:
    ttl = QueueTimes().api_ttl_s
    queue.run(queue.scripts.attend("api:1:a", ttl, begin=True))
    assert found(queue) == {}
    queue.redis.expire(queue.keys.live("api:1:a"), ttl - 20)
    (finding,) = found(queue).values()
    assert re.fullmatch(r"1: api:1:a \(silent for 2\d s, goes in \d+ s\)", finding.found)
    queue.redis.persist(queue.keys.live("api:1:a"))
    (finding,) = found(queue).values()
    assert finding.found == "1: api:1:a (stays for ever)"
    run_advice(queue, finding, api="api:1:a")
    assert found(queue) == {}


def test_a_lease_that_nobody_takes_up_is_found_until_somebody_sweeps(queue: SyncQueue) -> None:
    seconds, _ = queue.redis.time()
    queue.redis.zadd(queue.keys.leases, {"held/0": (seconds - 40) * 1000})
    (finding,) = found(queue).values()
    assert re.fullmatch(r"1: held/0 \(lease ended (39|4\d) s ago\)", finding.found)
    reap(queue)
    assert found(queue) == {}


def test_a_job_that_is_over_and_never_expires_is_found(queue: SyncQueue) -> None:
    queue.run(queue.scripts.finish("held/0", 1, WORKER, 0, (), "stop"))
    assert found(queue) == {}
    queue.redis.persist(queue.keys.job("held/0"))
    (finding,) = found(queue).values()
    run_advice(queue, finding, id="held/0")
    assert queue.redis.exists(queue.keys.job("held/0"), queue.keys.log("held/0")) == 0
    assert found(queue) == {}


def test_dead_letters_are_listed_until_they_are_forgotten(queue: SyncQueue) -> None:
    for name in ("a/0", "b/0"):
        queue.redis.xadd(queue.keys.dead, {"id": name, "why": "2 alone"})
    (finding,) = found(queue).values()
    assert set(finding.items) == {"a/0 (2 alone)", "b/0 (2 alone)"}
    assert "prelay dead" in finding.advice
    queue.redis.delete(queue.keys.dead)  # what that command comes to: tests/integration/test_ops.py
    assert found(queue) == {}


def test_a_server_with_more_than_can_be_read_in_time_says_so(queue: SyncQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "LOOK_S", 0.0)
    assert not look(queue.redis).complete


def test_the_command_shows_them_and_other_peoples_keys_are_none_of_its_business(
    queue: SyncQueue, null_folder: Path
) -> None:
    queue.redis.zrem(queue.keys.leases, "held/0")
    queue.redis.xadd(queue.keys.dead, {"id": "a/0", "why": "2 alone"})
    for foreign in ("prelay:other", "prelay:{odd}", "prelay:{f.0}", "prelay:{f.x}:job:a", "else:job:1"):
        queue.redis.set(foreign, "1")
    arguments = ("--null-model", "--model", str(null_folder), "--port", str(free_port()))
    code, shown = rows(*arguments, "--redis-url", queue.settings.url)
    assert code == 1, "an accepted job is lost"
    assert shown["jobs in no index"]["items"] == ["held/0 (prefill, not in leases)"]
    assert shown["dead letters"]["state"] == "warn"
    assert "prelay dead" in shown["dead letters"]["advice"]
    assert "odd" not in json.dumps(shown)
    assert f"{queue.keys.fleet}.0: 2 open job(s), 1 live worker(s)" in shown["fleets"]["found"]
