"""The queue in memory: what the contract suite (tests/integration/test_queue_*.py) cannot ask a server."""

from __future__ import annotations

import pytest

from prelay_queue.errors import QueueFull, QueueUnavailable
from prelay_queue.job import JobSpec, Sampling
from prelay_queue.keys import Keys
from prelay_queue.scripts import JOB_SCRIPTS, Emission, Emitted, NewJob, Scripts
from prelay_queue.state import State
from tests.bed.double import AsyncMemoryQueue, MemoryQueue
from tests.bed.double.data import Stream
from tests.bed.double.scripts import Execution

JOB = "r/0"
NEW = NewJob(JobSpec(JOB, (1, 2, 3), Sampling(max_tokens=4)), "api:1:a#1")


class Clock:
    """A server's clock in the hands of a test."""

    def __init__(self) -> None:
        self.ms = 1_000_000

    def __call__(self) -> int:
        return self.ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> MemoryQueue:
    return MemoryQueue(clock=clock)


def run_job(queue: MemoryQueue, lease_ms: int) -> None:
    """Submit the job and have it claimed by `w`."""
    queue.run(queue.scripts.submit([NEW]))
    place = queue.data.jobs[JOB].place
    assert place is not None
    assert queue.run(queue.scripts.claim(*place, JOB, "w", lease_ms)).code == "ok"


@pytest.mark.parametrize("name", JOB_SCRIPTS)
def test_every_script_of_jobs_is_there(name: str) -> None:
    assert callable(getattr(Execution, name))


def test_a_lease_ends_by_the_clock(queue: MemoryQueue, clock: Clock) -> None:
    run_job(queue, lease_ms=10_000)
    sweep = queue.scripts.reap(10, 0, 10**9, 2, "")
    clock.ms += 9_999
    assert queue.run(sweep).reaped == ()
    clock.ms += 1
    assert queue.run(sweep).reaped == (JOB,)


def test_a_job_that_is_over_is_forgotten_after_its_retention(queue: MemoryQueue, clock: Clock) -> None:
    run_job(queue, lease_ms=10_000)
    assert queue.run(queue.scripts.finish(JOB, 1, "w", 0, (7,), "stop")) == "ok"
    clock.ms += 299_999
    assert queue.run(queue.scripts.view(JOB)) is not None
    clock.ms += 1
    assert queue.run(queue.scripts.view(JOB)) is None


def test_several_calls_answer_each_by_itself(queue: MemoryQueue) -> None:
    run_job(queue, lease_ms=10_000)
    queue.full = True
    emit, submit = queue.scripts.emit("w", [Emission(JOB, 1, 0, (7,))]), queue.scripts.submit([NEW])
    answers = queue.run_many([submit, queue.scripts.adopt(JOB, 1, "w"), emit])
    assert isinstance(answers[0], QueueFull)
    assert answers[1:] == ["ok", [Emitted("ok", 1)]]


def test_a_server_that_is_away_runs_nothing(queue: MemoryQueue) -> None:
    queue.away = QueueUnavailable("away")
    with pytest.raises(QueueUnavailable):
        queue.run(queue.scripts.submit([NEW]))
    with pytest.raises(QueueUnavailable):
        queue.run_many([queue.scripts.submit([NEW])])
    queue.away = None
    assert queue.run(queue.scripts.view(JOB)) is None


async def test_both_clients_see_one_partition(queue: MemoryQueue) -> None:
    twin = AsyncMemoryQueue(queue)
    assert await twin.run(twin.scripts.submit([NEW])) == ("new",)
    assert queue.data.jobs[JOB].state is State.QUEUED
    await twin.aclose()


def test_a_call_for_another_fleet_is_refused(queue: MemoryQueue) -> None:
    with pytest.raises(AssertionError):
        queue.run(Scripts(Keys("another")).submit([NEW]))


def test_entries_of_one_moment_have_ids_of_their_own() -> None:
    stream = Stream()
    assert [stream.add(5, {}) for _ in range(2)] == ["5-0", "5-1"]
    assert stream.add(4, {}) == "5-2"  # a clock that goes back
    assert stream.add(6, {}, most=2) == "6-0"
    assert list(stream.entries) == ["5-2", "6-0"]
