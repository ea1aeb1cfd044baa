"""The model loop carries out what the scheduling policy decides: who is evicted for whom, and what is written of it."""

from __future__ import annotations

import orjson
import pytest

from prelay_queue.job import Claim, Priority
from prelay_worker.config import Role
from prelay_worker.messages import Claimed, Copied, Exported, Message, Release
from prelay_worker.policy import Opening
from prelay_worker.worker import Worker
from prelay_worker.writer import Adopt, GiveUp, Handoff, Recall, Write
from tests.unit.worker.desk import free, give, make_claim, make_worker, step


def batch(job: str, submitted_ms: int = 1, prompt: int = 4, preemptions: int = 0, ids: tuple[int, ...] = ()) -> Claim:
    return make_claim(
        job, prompt, 2, priority=Priority.BATCH, submitted_ms=submitted_ms, preemptions=preemptions, ids=ids
    )


def urgent(job: str = "now/0", prompt: int = 4, priority: Priority = Priority.INTERACTIVE) -> Claim:
    return make_claim(job, prompt, 2, priority=priority, submitted_ms=99)


def given_up(writes: list[Write]) -> list[tuple[str, str]]:
    return [(write.job, write.reason) for write in writes if isinstance(write, GiveUp)]


def opening(worker: Worker) -> Opening:
    return worker._opening(worker._room())


# For a slot.


@pytest.mark.parametrize("role", [Role.UNIFIED, Role.PREFILL])
@pytest.mark.parametrize("priority", [Priority.INTERACTIVE, Priority.NORMAL])
def test_a_batch_job_is_evicted_for_an_urgent_one_when_the_slots_are_full(role: Role, priority: Priority) -> None:
    worker, writes = make_worker(role, max_running=2)
    give(worker, batch("old/0", 1), batch("new/0", 2))
    assert opening(worker) == Opening(room=3, full=2)
    give(worker, urgent(priority=priority))
    assert given_up(writes) == [("new/0", "urgent")]
    assert sorted(worker.attempts) == ["now/0@1", "old/0@1"]


def test_no_job_is_evicted_for_one_of_its_class_and_no_normal_one_for_anybody() -> None:
    worker, writes = make_worker(Role.UNIFIED, max_running=1)
    give(worker, make_claim())
    assert opening(worker) == Opening(room=3, full=0, unserved=True)
    give(worker, urgent(), batch("b/0"))
    assert (given_up(writes), list(worker.attempts)) == ([], ["r/0@1"])


@pytest.mark.parametrize("role", [Role.UNIFIED, Role.PREFILL])
def test_a_job_that_was_preempted_often_enough_is_not_evicted_where_it_is_prefilled_either(role: Role) -> None:
    worker, writes = make_worker(role, max_running=1)
    give(worker, batch("b/0", preemptions=3))
    assert opening(worker).full == 0
    give(worker, urgent())
    assert (given_up(writes), list(worker.attempts)) == ([], ["b/0@1"])


def test_a_job_that_is_being_copied_in_is_evicted_only_when_the_copy_has_ended() -> None:
    worker, writes = make_worker(Role.DECODE, max_running=1)
    worker._copiers.submit = lambda *_: None  # type: ignore[attr-defined]
    give(worker, batch("b/0", ids=(7,)))
    assert opening(worker).full == 0
    now = make_claim("now/0", priority=Priority.INTERACTIVE, submitted_ms=99, ids=(7,))
    give(worker, now)
    assert writes == []
    give(worker, Copied("b/0@1"))
    assert writes == [Adopt("b/0", 1), GiveUp("b/0", 1, "urgent")]
    assert list(worker.attempts) == ["now/0@1"]


# In the middle of a step.


@pytest.mark.parametrize("role", list(Role))
def test_an_urgent_claim_calls_the_loop_from_a_step_until_it_is_heard(role: Role) -> None:
    worker, _ = make_worker(role)
    called = []
    for message in (Claimed(batch("b/0")), Release("b/0", 1), Claimed(urgent())):
        worker._post(message)
        called.append(worker._called.is_set())
    worker._drain_inbox()
    assert [*called, worker._called.is_set()] == [False, False, True, False]


def test_what_an_urgent_head_may_wait_for_calls_the_loop_too() -> None:
    worker, _ = staged("b/0")
    give(worker, urgent(prompt=8))
    worker._post(Release("b/0", 1))
    assert worker._called.is_set()
    give(worker)
    assert list(worker.attempts) == ["now/0@1"]
    worker._post(Release("b/0", 1))
    assert not worker._called.is_set(), "nobody waits any more"


def test_an_urgent_copy_that_has_ended_calls_the_loop_and_that_of_a_batch_job_does_not() -> None:
    worker, _ = make_worker(Role.DECODE)
    worker._copiers.submit = lambda *_: None  # type: ignore[attr-defined]
    for priority, called in ((Priority.BATCH, False), (Priority.NORMAL, True)):
        kv = orjson.dumps({"null": f"{priority}/0", "tokens": 4})
        claim = make_claim(f"{priority}/0", priority=priority, ids=(7,), kv=kv)
        give(worker, claim)
        worker._copy(claim)  # type: ignore[attr-defined]
        assert worker._called.is_set() == called


# For blocks.


def test_a_batch_job_is_evicted_for_the_blocks_of_an_urgent_one_and_only_if_they_are_enough() -> None:
    worker, writes = make_worker(Role.PREFILL, blocks=8)
    give(worker, make_claim("kept/0", 16), batch("b/0", 1, prompt=14))
    give(worker, urgent("large/0", prompt=20))
    assert given_up(writes) == []
    give(worker, urgent("small/0", prompt=16))
    assert given_up(writes) == [], "the large one is before it"
    worker, writes = make_worker(Role.PREFILL, blocks=8)
    give(worker, make_claim("kept/0", 16), batch("b/0", 1, prompt=14))
    give(worker, urgent(prompt=16))
    assert given_up(writes) == [("b/0", "urgent")]


def staged(*jobs: str, blocks: int = 4) -> tuple[Worker, list[Write]]:
    """A prefill worker that is full of batch jobs which wait for a decode worker."""
    worker, writes = make_worker(Role.PREFILL, blocks)
    give(worker, *(batch(job, prompt=4 * blocks // len(jobs) - 2) for job in jobs))
    step(worker)
    assert opening(worker).full == 0, "the hand-over is on its way"
    give(worker, *(Exported(f"{job}@1") for job in jobs))
    assert [type(write) for write in writes] == [Handoff] * len(jobs)
    assert (free(worker), opening(worker)) == (0, Opening(room=3, full=2))
    writes.clear()
    return worker, writes


def test_a_staged_batch_job_is_asked_back_and_its_blocks_are_used_when_it_is_given_back() -> None:
    worker, writes = staged("a/0", "b/0")
    give(worker, urgent(prompt=8))
    assert writes == [Recall("b/0", 1, "urgent")]
    assert free(worker) == 0, "a decode worker may be reading them"
    give(worker)
    assert len(writes) == 1, "it is waited for, nobody else goes"
    give(worker, Release("b/0", 1))
    assert sorted(worker.attempts) == ["a/0@1", "now/0@1"]


def test_one_that_a_decode_worker_took_at_that_moment_is_kept_until_that_has_copied_it() -> None:
    worker, writes = staged("b/0")
    give(worker, urgent(prompt=8))
    give(worker)  # refused: the writer says nothing
    assert (writes, list(worker.attempts)) == ([Recall("b/0", 1, "urgent")], ["b/0@1"])
    give(worker, Release("b/0", 1))  # adopted
    assert list(worker.attempts) == ["now/0@1"]


# Patience.


def test_a_batch_job_that_waits_lets_urgent_ones_pass_until_its_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("prelay_worker.heads.time.monotonic", lambda: now)
    worker, _ = make_worker(Role.PREFILL, blocks=4, patience_s=10)
    give(worker, make_claim("r/0", 8), batch("b/0", prompt=12))
    assert opening(worker) == Opening(room=2, full=0)
    give(worker, urgent("one/0"))
    assert sorted(worker.attempts) == ["one/0@1", "r/0@1"]
    now = 10
    assert opening(worker).room == 1
    now = 20
    assert opening(worker).room == 0
    give(worker, urgent("two/0"))
    assert sorted(worker.attempts) == ["one/0@1", "r/0@1"]
    for job in ("r/0@1", "one/0@1"):
        worker._free(worker.attempts[job])
    give(worker)
    assert sorted(worker.attempts) == ["b/0@1", "two/0@1"]
    assert worker.attempts["b/0@1"].urgency == 0, "what it has waited for counts while it runs"


# Reservations.


def test_a_reservation_waits_for_its_whole_kv_and_the_engine_is_told_to_keep_it() -> None:
    worker, _ = make_worker(Role.UNIFIED, blocks=6)
    give(worker, make_claim("r/0", 16))
    give(worker, make_claim("kept/0", 4, max_tokens=8, preemptions=3))
    assert list(worker.attempts) == ["r/0@1"], "3 blocks are wanted, 2 are free; its prompt alone would fit"
    worker._free(worker.attempts["r/0@1"])
    give(worker)
    assert free(worker) == 3
    assert worker.attempts["kept/0@1"].reserved == 3


@pytest.mark.parametrize("message", [Release("b/0", 1), Exported("b/0@1")], ids=str)
def test_an_answer_that_comes_late_finds_nothing_to_free(message: Message) -> None:
    worker, _ = staged("b/0")
    give(worker, urgent(prompt=8), Release("b/0", 1))
    give(worker, message)
    assert list(worker.attempts) == ["now/0@1"]
