"""Contracts of the scripts of batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import pytest

from prelay_queue.batches import BatchProgress, BatchScripts, BatchState, BatchStatus, Kept, Taken
from prelay_queue.client import SyncQueue
from prelay_queue.errors import QueueFull
from prelay_queue.scripts import Call, text
from tests.bed.servers import Server

R = TypeVar("R")

BATCH, OTHER = "batch_a", "batch_b"
RUNNER, HEIR = "batch:1:a", "batch:2:b"
LEASE_MS, DAY_MS = 60_000, 86_400_000
RECORD = b'{"id": "batch_a"}'
SOME = BatchProgress(total=9, completed=5, failed=1, prompt_tokens=70, completion_tokens=8)
MORE = BatchProgress(total=9, completed=8, failed=1, prompt_tokens=10**15, completion_tokens=80)
ENDS = [status for status in BatchStatus if status.over]


class BatchDesk:
    """A partition at which a test plays the API, runners and the watchdog."""

    def __init__(self, queue: SyncQueue) -> None:
        self.queue, self.keys, self.scripts = queue, queue.keys, BatchScripts(queue.keys)

    def run(self, call: Call[R]) -> R:
        return self.queue.run(call)

    def twice(self, call: Call[R]) -> R:
        """As after a lost reply: the second answer, which must be the first."""
        first, between = self.run(call), self.everything()
        assert self.run(call) == first
        assert {**self.everything(), "lease": b""} == {**between, "lease": b""}
        return first

    def open(self, batch: str = BATCH, left_ms: int = DAY_MS, floor: int = 0) -> str:
        return self.run(self.scripts.open(batch, RECORD, left_ms, floor))

    def take(self, owner: str = RUNNER, batch: str = BATCH) -> Taken:
        return self.run(self.scripts.take(batch, owner, LEASE_MS))

    def keep(
        self,
        epoch: int = 1,
        owner: str = RUNNER,
        status: BatchStatus = BatchStatus.IN_PROGRESS,
        progress: BatchProgress = SOME,
        lease_ms: int = LEASE_MS,
    ) -> Kept:
        return self.run(self.scripts.keep(BATCH, epoch, owner, lease_ms, status, progress))

    def end(self, epoch: int = 1, owner: str = RUNNER, status: BatchStatus = BatchStatus.COMPLETED) -> str:
        return self.run(self.scripts.end(BATCH, epoch, owner, status, MORE, "file-out", "file-err"))

    def look(self, batch: str = BATCH) -> BatchState:
        found = self.run(self.scripts.look(batch))
        assert found is not None
        return found

    def stale(self, after_ms: int = 5_000, limit: int = 100) -> tuple[str, ...]:
        return self.run(self.scripts.stale(after_ms, limit))

    def listed(self) -> set[str]:
        found: Any = self.queue.redis.zrange(self.keys.batches, 0, -1)
        return {text(each) for each in found}

    def everything(self) -> dict[str, bytes]:
        found: Any = self.queue.redis.hgetall(self.keys.batch(BATCH))
        return {text(name): value for name, value in found.items()} | {"listed": str(self.listed()).encode()}

    def age(self, field: str, by_ms: int, batch: str = BATCH) -> None:
        """What happened, happened earlier."""
        self.queue.redis.hincrby(self.keys.batch(batch), field, -by_ms)


@pytest.fixture
def desk(any_server: Server) -> Iterator[BatchDesk]:
    queue = SyncQueue(any_server.settings())
    yield BatchDesk(queue)
    for key in queue.redis.keys(f"{queue.keys.prefix}*"):
        queue.redis.delete(key)
    queue.close()


def test_a_batch_begins_once(desk: BatchDesk) -> None:
    assert desk.open() == "new"
    found = desk.look()
    assert (found.record, found.status, found.epoch, found.owner) == (RECORD, BatchStatus.VALIDATING, 0, "")
    assert (found.progress, found.cancel, found.lease_left_ms) == (BatchProgress(), False, 0)
    assert found.deadline_ms - found.created_ms == DAY_MS
    assert DAY_MS - 5_000 < found.left_ms <= DAY_MS
    before = desk.everything()
    assert desk.run(desk.scripts.open(BATCH, b"another", 1, 7)) == "exists"
    assert desk.everything() == before
    assert desk.listed() == {BATCH}


def test_nobody_knows_a_batch_that_never_began(desk: BatchDesk) -> None:
    assert desk.run(desk.scripts.look(BATCH)) is None
    assert desk.take() == Taken("gone")
    assert desk.keep() == Kept("gone")
    assert desk.end() == "gone"
    assert desk.run(desk.scripts.cancel(BATCH)) == "gone"
    assert desk.listed() == set()


def test_a_full_server_takes_no_new_batch_and_lets_those_that_run_end(desk: BatchDesk, any_server: Server) -> None:
    desk.open()
    any_server.client.config_set("maxmemory", 1)
    try:
        with pytest.raises(QueueFull):
            desk.open(OTHER)
        assert desk.take().code == "ok"
        assert desk.keep().code == "ok"
        assert desk.look().status == BatchStatus.IN_PROGRESS
        assert desk.run(desk.scripts.cancel(BATCH)) == "cancelling"
        assert desk.stale() == ()
        assert desk.end() == "ok"
    finally:
        any_server.client.config_set("maxmemory", 0)


def test_one_runner_has_a_batch_until_its_lease_ends(desk: BatchDesk) -> None:
    desk.open()
    assert desk.take(RUNNER) == Taken("ok", 1)
    held = desk.take(HEIR)
    assert (held.code, held.epoch) == ("held", 1)
    assert LEASE_MS - 5_000 < held.wait_ms <= LEASE_MS
    desk.age("lease", 2 * LEASE_MS)
    assert desk.take(HEIR) == Taken("ok", 2)
    assert desk.take(RUNNER).code == "held"
    assert desk.look().owner == HEIR


def test_whoever_takes_it_again_has_the_epoch_that_it_has(desk: BatchDesk) -> None:
    desk.open()
    assert desk.twice(desk.scripts.take(BATCH, RUNNER, LEASE_MS)) == Taken("ok", 1)
    desk.age("lease", 2 * LEASE_MS)
    assert desk.take(RUNNER) == Taken("ok", 1), "nobody else had it meanwhile"
    assert LEASE_MS - 5_000 < desk.look().lease_left_ms <= LEASE_MS


def test_epochs_are_above_those_that_wrote_to_disk_before_redis_forgot_them(desk: BatchDesk) -> None:
    desk.open(floor=4)
    assert desk.take(RUNNER) == Taken("ok", 5)
    desk.age("lease", 2 * LEASE_MS)
    assert desk.run(desk.scripts.take(BATCH, HEIR, LEASE_MS, 9)) == Taken("ok", 10)
    desk.age("lease", 2 * LEASE_MS)
    assert desk.run(desk.scripts.take(BATCH, RUNNER, LEASE_MS, 3)) == Taken("ok", 11)


def test_a_runner_says_how_far_it_is_and_hears_how_long_it_has(desk: BatchDesk) -> None:
    desk.open()
    desk.take()
    desk.age("lease", LEASE_MS - 1000)
    kept = desk.keep()
    assert (kept.code, kept.cancel) == ("ok", False)
    assert DAY_MS - 5_000 < kept.left_ms <= DAY_MS
    found = desk.look()
    assert (found.status, found.progress) == (BatchStatus.IN_PROGRESS, SOME)
    assert found.lease_left_ms > LEASE_MS - 5_000
    assert found.created_ms <= found.started_ms
    assert found.finalizing_ms == found.ended_ms == found.cancelling_ms == 0
    desk.age("exp", 2 * DAY_MS)
    assert -DAY_MS - 5_000 < desk.keep().left_ms <= -DAY_MS


def test_a_lease_that_ended_is_renewed_while_nobody_else_has_the_batch(desk: BatchDesk) -> None:
    desk.open()
    desk.take()
    desk.age("lease", 2 * LEASE_MS)
    assert desk.keep().code == "ok"
    assert desk.take(HEIR).code == "held"


def test_a_lease_of_nothing_gives_the_batch_back(desk: BatchDesk) -> None:
    desk.open()
    desk.take()
    assert desk.keep(lease_ms=0).code == "ok"
    assert desk.take(HEIR) == Taken("ok", 2)


def test_the_status_goes_forward_only_also_with_the_next_runner(desk: BatchDesk) -> None:
    desk.open()
    desk.take()
    for status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING):
        desk.keep(status=status)
        assert desk.look().status == status
        if status is BatchStatus.IN_PROGRESS:
            desk.age("started", 5_000)
    began, finalizing = desk.look().started_ms, desk.look().finalizing_ms
    assert 0 < began <= finalizing - 5_000
    desk.age("lease", 2 * LEASE_MS)
    desk.take(HEIR)
    desk.keep(2, HEIR, BatchStatus.IN_PROGRESS)
    found = desk.look()
    assert (found.status, found.started_ms, found.finalizing_ms) == (BatchStatus.FINALIZING, began, finalizing)


@pytest.mark.parametrize(("epoch", "owner"), [(1, RUNNER), (2, RUNNER), (1, HEIR), (3, HEIR), (0, "")])
def test_a_runner_that_lost_the_batch_changes_nothing(desk: BatchDesk, epoch: int, owner: str) -> None:
    desk.open()
    desk.take(RUNNER)
    desk.age("lease", 2 * LEASE_MS)
    desk.take(HEIR)
    before = desk.everything()
    assert desk.keep(epoch, owner) == Kept("fenced")
    assert desk.end(epoch, owner) == "fenced"
    assert desk.everything() == before


def test_nobody_writes_to_a_batch_that_nobody_took(desk: BatchDesk) -> None:
    desk.open()
    assert desk.keep(0, "") == Kept("fenced")
    assert desk.end(0, "") == "fenced"


@pytest.mark.parametrize("status", ENDS)
def test_a_batch_ends_once_and_redis_forgets_it_a_day_later(desk: BatchDesk, status: BatchStatus) -> None:
    desk.open()
    desk.take()
    errors = '[{"code": "x"}]'
    end = desk.scripts.end(BATCH, 1, RUNNER, status, MORE, "file-out", "file-err", errors)
    assert desk.twice(end) == "ok"
    found = desk.look()
    assert (found.status, found.progress, found.lease_left_ms) == (status, MORE, 0)
    assert (found.output_file, found.error_file, found.errors) == ("file-out", "file-err", errors)
    assert found.ended_ms >= found.created_ms
    assert DAY_MS - 5_000 < desk.queue.redis.pttl(desk.keys.batch(BATCH)) <= DAY_MS
    assert desk.listed() == set()
    before = desk.everything()
    for other in ENDS:
        assert desk.end(1, RUNNER, other) == ("ok" if other is status else "over")
        assert desk.end(2, HEIR, other) == "over"
    assert desk.keep().code == "over"
    assert desk.take(HEIR) == Taken("over", 1)
    assert desk.run(desk.scripts.cancel(BATCH)) == status
    assert desk.open() == "exists"
    assert desk.everything() == before


def test_a_cancel_is_heard_by_whoever_runs_the_batch_and_is_not_taken_back(desk: BatchDesk) -> None:
    desk.open()
    assert desk.twice(desk.scripts.cancel(BATCH)) == "cancelling"
    desk.take()
    assert desk.keep().cancel
    assert desk.look().status == BatchStatus.CANCELLING
    assert desk.keep(status=BatchStatus.FINALIZING).cancel
    found = desk.look()
    assert (found.status, found.cancel) == (BatchStatus.CANCELLING, True)
    assert found.cancelling_ms >= found.created_ms
    assert desk.end(status=BatchStatus.CANCELLED) == "ok"


def test_a_batch_that_nobody_runs_is_found_and_one_that_somebody_runs_is_not(desk: BatchDesk) -> None:
    desk.open()
    assert desk.stale() == ()
    desk.age("created", 6_000)
    assert desk.stale() == (BATCH,), "nobody ever took it"
    desk.take()
    assert desk.stale() == ()
    desk.age("lease", LEASE_MS + 1_000)
    assert desk.stale() == ()
    desk.age("lease", 5_000)
    assert desk.stale() == (BATCH,), "its lease ended"
    desk.keep()
    assert desk.stale() == ()


def test_those_whose_runner_died_are_found_before_those_that_only_wait(desk: BatchDesk) -> None:
    for number in range(5):
        desk.open(f"batch_{number}")
        desk.age("created", 60_000 - number, f"batch_{number}")
        desk.queue.redis.zadd(desk.keys.batches, {f"batch_{number}": number})
    desk.take(batch="batch_3")
    desk.age("lease", LEASE_MS + 6_000, "batch_3")
    assert desk.stale() == ("batch_3", "batch_0", "batch_1", "batch_2", "batch_4")
    assert desk.stale(limit=2) == ("batch_3", "batch_0")


def test_the_index_is_put_right(desk: BatchDesk) -> None:
    redis, batches = desk.queue.redis, desk.keys.batches
    desk.open()
    redis.zadd(batches, {"batch_lost": 1})
    desk.stale()
    assert desk.listed() == {BATCH}
    for healed in (desk.open, desk.take, desk.keep, lambda: desk.run(desk.scripts.cancel(BATCH))):
        redis.delete(batches)
        healed()
        assert desk.listed() == {BATCH}
        assert redis.zscore(batches, BATCH) == desk.look().created_ms
    desk.end()
    redis.zadd(batches, {BATCH: 1})
    desk.stale()
    assert desk.listed() == set()
