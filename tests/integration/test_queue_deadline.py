"""Deadlines in the queue: a moment of the server's clock, which ends a job in whatever state, exactly once."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from prelay_queue.events import EndedEvent
from prelay_queue.job import FinishReason
from prelay_queue.state import SWEPT_IN, State
from tests.integration.queue_desk import API, D1, DOMAIN, JOB, LEASE_MS, P1, Desk, ServerDesk, new_job

LIVE = [state for state in State if state is not State.DONE]
OWNED = [state for state in State if SWEPT_IN.get(state) == "leases"]


def owner_in(state: State) -> str:
    """Who owns a job that `Desk.to` brought there."""
    return P1 if state in (State.PREFILL, State.STAGED) else D1


def ends(desk: Desk) -> list[EndedEvent]:
    return [event for event in desk.heard() if isinstance(event, EndedEvent)]


def brought(desk: Desk, state: State) -> None:
    """A job with a deadline, heard of by its API process and minded by its workers."""
    desk.to(state, new_job(ttl_ms=60_000))
    desk.listen(API)
    desk.mind(P1, D1)


# What is stored.


def test_a_deadline_is_kept_in_server_time(desk: Desk) -> None:
    desk.submit(new_job(ttl_ms=5_000))
    assert abs(int(desk.fields()["dl"]) - desk.now_ms() - 5_000) < 3_000


def test_a_job_without_a_deadline_is_in_no_index_of_deadlines(desk: Desk) -> None:
    desk.submit()
    assert "deadlines" not in desk.look().scores
    assert desk.expire() == ()


def test_a_job_that_redis_lost_comes_back_with_the_time_that_was_left(desk: Desk) -> None:
    new = new_job(ttl_ms=60_000)
    desk.submit(new)
    before = int(desk.fields()["dl"])
    desk.backend.lose_everything()
    late = replace(new, epoch=2, ids=(7, 8), ends_at=new.ends_at - 50)  # as if 50 s had gone by
    assert desk.submit(late) == ("new",)
    assert -53_000 < int(desk.fields()["dl"]) - before < -47_000


def test_a_job_whose_time_is_over_when_it_is_submitted_again_ends_at_once(desk: Desk) -> None:
    desk.submit(replace(new_job(), epoch=2, ids=(7,), ends_at=time.monotonic() - 5))
    desk.pass_deadline()  # one millisecond was left
    assert desk.expire() == (JOB,)
    assert (desk.view().reason, desk.view().ids) == ("deadline", (7,))


# Who ends it.


@pytest.mark.parametrize("state", LIVE)
def test_a_job_ends_by_its_deadline_in_every_state_once_and_everybody_hears_it(desk: Desk, state: State) -> None:
    brought(desk, state)
    standing = len(desk.view().ids)
    assert desk.expire() == ()
    desk.pass_deadline()
    assert desk.expire() == (JOB,)
    assert desk.expire() == ()
    assert ends(desk) == [EndedEvent(JOB, 1, standing, "deadline")]
    assert (desk.view().state, desk.view().reason) == ("done", "deadline")
    assert desk.waiting() == {}
    told = {worker: [op for op, _, _ in desk.told(worker)] for worker in (P1, D1)}
    assert ("stop" in told[owner_in(state)]) == (state in (*OWNED, State.PREEMPTED))
    assert ("release" in told[P1]) == (state in (State.STAGED, State.ADOPTING))


@pytest.mark.parametrize("state", OWNED)
def test_the_owner_may_end_a_job_for_its_deadline_and_later_writes_are_refused(desk: Desk, state: State) -> None:
    brought(desk, state)
    owner, standing = owner_in(state), len(desk.view().ids)
    assert desk.finish(standing, owner=owner, reason=FinishReason.DEADLINE) == "ok"
    assert desk.finish(standing, owner=owner, reason=FinishReason.DEADLINE) == "ok"  # the reply was lost
    assert desk.emit(standing, (5,), owner=owner).code == "done"
    assert desk.finish(standing, (5,), owner=owner) == "done"
    assert desk.expire() == ()
    assert ends(desk) == [EndedEvent(JOB, 1, standing, "deadline")]


def test_whoever_lost_the_job_cannot_end_it_for_its_deadline(desk: Desk) -> None:
    brought(desk, State.DECODE)
    desk.crash()
    assert desk.finish(3, reason=FinishReason.DEADLINE) == "fenced"
    assert desk.view().state == "queued"


@pytest.mark.parametrize("state", [State.QUEUED, State.STAGED])
def test_a_job_past_its_deadline_ends_at_the_claim_and_never_runs(desk: Desk, state: State) -> None:
    brought(desk, state)
    desk.pass_deadline()
    entry = desk.deliver(D1, "prefill" if state is State.QUEUED else f"decode:{DOMAIN}")
    call = desk.scripts.claim(*entry, D1, LEASE_MS)
    assert desk.run(call).code == "ended"
    assert desk.run(call).code == "stale"
    assert desk.expire() == ()
    assert ends(desk) == [EndedEvent(JOB, 1, len(desk.view().ids), "deadline")]
    assert desk.told(P1) == ([] if state is State.QUEUED else [("release", JOB, 1)])


def test_an_answer_that_was_complete_in_time_stays_complete(desk: Desk) -> None:
    brought(desk, State.DONE)
    assert "deadlines" not in desk.look().scores
    assert desk.expire() == ()
    assert desk.view().reason == "stop"


# What it survives.


def test_a_deadline_survives_a_preempt_a_requeue_and_a_crash(desk: Desk) -> None:
    brought(desk, State.PREEMPTED)
    dl = desk.look().scores["deadlines"][JOB]
    assert desk.requeue(1, f"{API}#1").code == "ok"
    claim = desk.claim(P1).claim
    assert claim is not None
    assert (claim.epoch, claim.deadline_ms) == (2, dl)
    assert desk.crash().reaped == (JOB,)
    assert desk.look().scores["deadlines"] == {JOB: dl}
    assert int(desk.fields()["dl"]) == dl


def test_a_cancelled_job_has_no_deadline_left(desk: Desk) -> None:
    brought(desk, State.DECODE)
    assert desk.cancel() == "ended"
    desk.backend.set_fields(JOB, dl=1)
    assert desk.expire() == ()
    assert desk.view().reason == "cancelled"


def test_only_so_many_are_ended_in_one_look_the_earliest_first(desk: Desk) -> None:
    for n in range(3):
        desk.submit(new_job(f"r{n}/0", ttl_ms=60_000))
        desk.pass_deadline(f"r{n}/0")
    assert desk.expire(2) == ("r0/0", "r1/0")
    assert desk.expire(2) == ("r2/0",)


def test_an_index_entry_whose_job_is_gone_is_taken_out(server_desk: ServerDesk) -> None:
    desk = server_desk
    desk.checked = False
    desk.submit(new_job(ttl_ms=60_000))
    desk.pass_deadline()
    desk.redis.delete(desk.keys.job(JOB))
    assert desk.expire() == ()
    assert not desk.redis.exists(desk.keys.deadlines)
