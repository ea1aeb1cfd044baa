"""A decode worker that cannot take KV over steps back."""

from __future__ import annotations

import pytest

from prelay_decode.reach import FIRST_PAUSE_S, MOST_IN_ROW, MOST_PAUSE_S, Reach
from prelay_worker.config import Role
from prelay_worker.errors import HandoverBlocked, HandoverBroken, HandoverFailed, HandoverStale
from prelay_worker.messages import Copied, key_of
from prelay_worker.policy import Opening
from prelay_worker.worker import Worker
from tests.bed.clock import Clock
from tests.unit.worker.desk import give, make_claim, make_worker

WHY = HandoverBlocked("no peer-to-peer access")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reach(clock: Clock) -> Reach:
    return Reach(clock)


def fail(reach: Reach, times: int = MOST_IN_ROW) -> None:
    for _ in range(times):
        reach.failed(WHY)


def test_a_few_failures_are_nothing_and_a_success_between_them_forgets_them(reach: Reach) -> None:
    for _ in range(5):
        fail(reach, MOST_IN_ROW - 1)
        assert (reach.stands_back, reach.pauses) == (False, False)
        reach.worked()


def test_each_trial_that_fails_doubles_the_pause_and_one_that_succeeds_ends_it(reach: Reach, clock: Clock) -> None:
    fail(reach)
    pauses = []
    for _ in range(7):
        begun = clock.now
        while reach.pauses:
            clock.now += 0.25
        pauses.append(clock.now - begun)
        assert reach.stands_back
        reach.failed(WHY)
    assert pauses == [FIRST_PAUSE_S, 2, 4, 8, 16, MOST_PAUSE_S, MOST_PAUSE_S]
    reach.worked()
    assert (reach.stands_back, reach.pauses) == (False, False)
    fail(reach)
    clock.now += FIRST_PAUSE_S
    assert not reach.pauses


def test_failures_of_one_moment_count_as_one_trial(reach: Reach, clock: Clock) -> None:
    fail(reach, 16)
    clock.now += FIRST_PAUSE_S
    assert not reach.pauses
    fail(reach, 2)
    clock.now += 2 * FIRST_PAUSE_S
    assert not reach.pauses


def test_it_says_once_a_trial_what_is_wrong(reach: Reach, caplog: pytest.LogCaptureFixture) -> None:
    fail(reach, 16)
    (record,) = caplog.records
    assert "3 times in a row, claims nothing for 1 s: no peer-to-peer access" in record.getMessage()


# In a worker.


def failed(worker: Worker, number: int, error: HandoverFailed | None) -> None:
    give(worker, make_claim(f"r{number}/0", ids=(7,)))
    give(worker, Copied(key_of(f"r{number}/0", 1), error))


def published(worker: Worker) -> tuple[int, Opening]:
    worker._publish()
    return worker._admission._slots, worker._admission._opening


@pytest.fixture
def worker(clock: Clock) -> Worker:
    found, _ = make_worker(Role.DECODE)
    found._copiers.submit = lambda *_: None  # type: ignore[attr-defined]
    found._reach = Reach(clock)  # type: ignore[attr-defined]
    return found


def test_a_worker_that_cannot_take_kv_over_claims_nothing_and_then_one_job_at_a_time(
    worker: Worker, clock: Clock
) -> None:
    free, opening = published(worker)
    for number in range(MOST_IN_ROW):
        assert published(worker) == (free, opening)
        failed(worker, number, WHY)
    assert published(worker) == (0, Opening())
    clock.now += FIRST_PAUSE_S
    assert published(worker) == (1, opening)
    give(worker, make_claim("trial/0", ids=(7,)))
    assert published(worker) == (0, Opening()), "one is being tried"
    give(worker, Copied(key_of("trial/0", 1)))
    assert published(worker)[0] == free - 1


@pytest.mark.parametrize("error", [HandoverStale("the exporter died"), HandoverBroken("layout")])
def test_what_a_job_or_its_exporter_is_to_blame_for_does_not_count(worker: Worker, error: HandoverFailed) -> None:
    before = published(worker)
    for number in range(9):
        failed(worker, number, error)
    assert published(worker) == before
