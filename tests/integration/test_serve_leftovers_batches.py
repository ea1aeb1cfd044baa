"""What `prelay doctor` finds in a real Redis of deadlines, counts, keys and batches, and that its advice helps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from prelay.doctor import fleets
from prelay_queue.batches import BatchProgress, BatchScripts, BatchStatus
from prelay_queue.client import SyncQueue
from prelay_queue.keys import Keys
from tests.bed.servers import Server
from tests.integration.queue_desk import new_job
from tests.integration.test_serve_leftovers import found, reap, run_advice

DAY_MS = 86_400_000


@pytest.fixture
def queue(own_server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[SyncQueue]:
    """A fleet with a job that waits and one that is over, and a batch of each kind."""
    monkeypatch.setattr(fleets, "BETWEEN_S", 0.0)  # nothing moves here
    queue = SyncQueue(own_server.settings())
    jobs, batches = queue.scripts, BatchScripts(queue.keys)
    for name in ("waits/0", "over/0"):
        queue.run(jobs.submit([new_job(name, ttl_ms=60_000, key=f"key-{name}", digest="d")]))
    queue.run(jobs.cancel("over/0"))
    for name in ("new", "run", "over"):
        queue.run(batches.open(name, b"{}", DAY_MS))
    for name in ("run", "over"):
        queue.run(batches.take(name, "r", 60_000))
    queue.run(batches.end("over", 1, "r", BatchStatus.COMPLETED, BatchProgress()))
    queue.redis.hset(queue.keys.batch("new"), "created", 1)
    yield queue
    queue.close()


def test_what_the_scripts_leave_is_sound(queue: SyncQueue) -> None:
    assert found(queue) == {}


#: What is done to Redis, through its client, at the keys of the fleet.
Damage = Callable[[Any, Keys], object]


@pytest.mark.parametrize(
    ("damage", "name", "words", "named"),
    [
        (lambda r, k: r.delete(k.waiting), "counts of what waits", "waits/0 (waits, not counted)", {}),
        (lambda r, k: r.hincrby(k.waiting, "#tokens:normal", 3), "counts of what waits", "tokens:normal 7 (the", {}),
        (lambda r, k: r.zadd(k.deadlines, {"over/0": 1}), "deadlines without job", "over/0 (over)", {"id": "over/0"}),
        (lambda r, k: r.delete(k.deadlines), "deadlines that nobody keeps", "waits/0", {"id": "waits/0", "ms": "1"}),
        (lambda r, k: r.persist(k.keyed("key-over/0")), "request keys that stay", "key-over/0", {"key": "key-over/0"}),
        (lambda r, k: r.zrem(k.batches, "run"), "batches in no index", "run (validating)", {"id": "run"}),
        (lambda r, k: r.zadd(k.batches, {"over": 1}), "batch entries without batch", "over (com", {"id": "over"}),
        (lambda r, k: r.zadd(k.batches, {"none": 1}), "batch entries without batch", "none (no s", {"id": "none"}),
        (lambda r, k: r.persist(k.batch("over")), "ended batches that stay", "over", {"id": "over"}),
    ],
)
def test_damage_is_found_and_put_right_as_advised(
    queue: SyncQueue, damage: Damage, name: str, words: str, named: dict[str, str]
) -> None:
    damage(queue.redis, queue.keys)
    findings = found(queue)
    assert set(findings) == {name}
    assert any(item.startswith(words) for item in findings[name].items), findings
    run_advice(queue, findings[name], **named)
    reap(queue)
    queue.run(queue.scripts.expire(100))
    assert found(queue) == {}


def test_a_deadline_that_passed_long_ago_is_found_until_somebody_looks(queue: SyncQueue) -> None:
    queue.redis.zadd(queue.keys.deadlines, {"waits/0": 1})
    (finding,) = found(queue)["leases long expired"].items
    assert finding.startswith("waits/0 (its deadline passed")
    queue.run(queue.scripts.expire(100))
    assert found(queue) == {}


def test_a_batch_whose_runner_was_lost_is_found_until_the_next_takes_it(queue: SyncQueue) -> None:
    queue.redis.hset(queue.keys.batch("run"), "lease", 1)
    waits, lost = sorted(found(queue)["batches that nobody runs"].items)
    assert lost.startswith("run (its runner was lost")
    assert waits.startswith("new (asked for"), "and now it is not for a busy runner that this one waits"
    queue.run(BatchScripts(queue.keys).take("run", "heir", 60_000))
    assert found(queue) == {}
