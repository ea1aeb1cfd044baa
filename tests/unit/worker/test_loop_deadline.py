"""Deadlines in the model loop: what is too late ends between two steps, whether Redis answers or not."""

from __future__ import annotations

import time
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from prelay_queue.job import Priority
from prelay_worker.config import Role
from prelay_worker.messages import Copied, Exported, Release
from prelay_worker.worker import Worker
from prelay_worker.writer import Adopt, Expire, Handoff, Tokens, Write
from tests.unit.worker.desk import free, give, held, make_claim, make_worker, step

NOW_MS = 1_000_000
LATE, EARLY = NOW_MS - 1, NOW_MS + 60_000


def look(worker: Worker, server_ms: int = NOW_MS) -> None:
    """The loop looks for late jobs when the server's clock shows this."""
    worker.leases._beaten = (server_ms, time.monotonic())
    worker._end_overdue()


def expired(writes: list[Write]) -> list[str]:
    return [write.key for write in writes if isinstance(write, Expire)]


def test_a_prompt_that_is_being_computed_is_given_up() -> None:
    worker, writes = make_worker(Role.PREFILL)
    worker.leases.hold("r/0", 1)
    give(worker, make_claim(deadline_ms=LATE))
    assert free(worker) == 15
    look(worker)
    assert writes == [Expire("r/0", 1)]
    assert (free(worker), worker.attempts, held(worker)) == (16, {}, {})


def test_an_answer_ends_between_two_steps_after_the_tokens_that_it_has() -> None:
    worker, writes = make_worker(Role.UNIFIED)
    give(worker, make_claim(deadline_ms=EARLY))
    step(worker)
    look(worker, EARLY)
    assert not expired(writes)
    step(worker)
    look(worker, EARLY + 1)
    assert [type(write) for write in writes] == [Adopt, Tokens, Tokens, Expire]
    assert (free(worker), worker.attempts) == (16, {})


def test_a_job_that_waits_for_room_never_begins() -> None:
    worker, writes = make_worker(Role.UNIFIED, blocks=4)
    give(worker, make_claim("a/0", prompt=12, max_tokens=4))
    worker.leases.hold("b/0", 1)
    give(worker, make_claim("b/0", prompt=12, max_tokens=4, deadline_ms=LATE))
    look(worker)
    assert expired(writes) == ["b/0@1"]
    assert list(worker.attempts) == ["a/0@1"]
    assert not worker._heads
    assert held(worker) == {}


def test_blocks_that_a_copy_still_writes_are_free_when_it_has_ended() -> None:
    worker, writes = make_worker(Role.DECODE)
    give(worker, make_claim(ids=(7,), deadline_ms=LATE))
    look(worker)
    assert expired(writes) == ["r/0@1"]
    assert free(worker) < 16
    give(worker, Copied("r/0@1"))
    assert free(worker) == 16
    worker.close_role()


def test_an_export_is_kept_until_the_queue_says_that_nobody_reads_it() -> None:
    worker, writes = make_worker(Role.PREFILL)
    give(worker, make_claim(deadline_ms=LATE))
    step(worker)
    look(worker)  # the hand-over is on its way
    give(worker, Exported("r/0@1"))
    look(worker)  # and stands
    assert [type(write) for write in writes] == [Handoff]
    assert free(worker) == 15
    give(worker, Release("r/0", 1))  # by `expire`, or by the adoption
    assert (free(worker), worker.attempts) == (16, {})


def test_while_the_server_has_not_told_its_time_nothing_is_late() -> None:
    worker, writes = make_worker(Role.PREFILL)
    give(worker, make_claim(deadline_ms=1))
    worker._end_overdue()
    assert not writes
    assert list(worker.attempts) == ["r/0@1"]


jobs = st.lists(st.tuples(st.sampled_from([0, LATE, NOW_MS, EARLY]), st.booleans()), max_size=6)


@given(jobs=jobs, role=st.sampled_from([Role.PREFILL, Role.UNIFIED]))
@settings(max_examples=60, deadline=None)
def test_exactly_what_is_late_and_not_handed_over_ends_and_once(jobs: list[tuple[int, bool]], role: Role) -> None:
    worker, writes = make_worker(role, blocks=64)
    late = []
    for n, (deadline_ms, stepped) in enumerate(jobs):
        claim = replace(make_claim(f"r{n}/0", priority=Priority.NORMAL), deadline_ms=deadline_ms)
        give(worker, claim)
        if stepped:
            step(worker)
        handed_over = role is Role.PREFILL and any(done for _, done in jobs[n:])
        if deadline_ms == LATE and not handed_over:
            late.append(f"r{n}/0@1")
    look(worker)
    look(worker)
    assert sorted(expired(writes)) == sorted(late)
    assert sorted({*worker.attempts, *late}) == [f"r{n}/0@1" for n in range(len(jobs))]
    assert not set(late) & set(worker.attempts)
    for key in list(worker.attempts):
        worker._free(worker.attempts[key])
    assert free(worker) == 64
