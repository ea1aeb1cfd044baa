"""Contracts of requeue, finish and cancel,."""

from __future__ import annotations

import pytest

from prelay_queue.events import EndedEvent, RequeuedEvent, TokensEvent
from prelay_queue.scripts import Requeued
from prelay_queue.state import SWEPT_IN, State
from tests.integration.queue_desk import API, D1, JOB, P1, P2, Desk, new_job

ME = f"{API}#1"
RETENTION_MS = 300_000
LIVE = [state for state in State if state is not State.DONE]
RUNNING = [state for state in LIVE if SWEPT_IN[state] == "leases"]
OWNER = {State.PREFILL: P1, State.STAGED: P1, State.ADOPTING: D1, State.DECODE: D1}
SEQ = {State.PREFILL: 0, State.STAGED: 1, State.ADOPTING: 1, State.DECODE: 3}


def ends(desk: Desk) -> list[EndedEvent]:
    return [event for event in desk.heard() if isinstance(event, EndedEvent)]


# requeue


def test_the_sole_viewer_resumes_at_what_it_delivered_and_the_rest_is_gone(desk: Desk) -> None:
    desk.to(State.PREEMPTED)
    desk.listen(API)
    assert desk.requeue(1, ME) == Requeued("ok", 2, 1)
    assert desk.log() == [("1-0", {"t": "7"})]
    assert desk.view().resume == 1
    assert desk.heard() == [RequeuedEvent(JOB, 2, 1)]
    assert desk.waiting() == {"work:prefill:normal:r": [JOB]}
    claim = desk.claim(P2).claim
    assert claim is not None
    assert (claim.epoch, claim.ids, claim.preemptions) == (2, (7,), 1)
    assert desk.handoff(2, P2, seq=1, token=80) == "ok"
    assert desk.log() == [("1-0", {"t": "7"}), ("2-1", {"t": "80"})]


@pytest.mark.parametrize(("resume", "kept"), [(0, 0), (2, 2), (3, 3), (4, 3), (99, 3), (-1, 3)])
def test_a_resume_is_never_past_what_was_emitted(desk: Desk, resume: int, kept: int) -> None:
    desk.to(State.PREEMPTED)
    assert desk.requeue(resume, ME) == Requeued("ok", 2, kept)
    assert desk.view().ids == (7, 8, 9)[:kept]


@pytest.mark.parametrize(
    ("attached", "token"),
    [(ME, f"{API}#2"), (ME, ""), (f"{ME} {API}#2", ME), (f"{ME} {API}#2", f"{API}#2"), ("", ME)],
)
def test_whoever_is_not_the_sole_viewer_resumes_at_emitted(desk: Desk, attached: str, token: str) -> None:
    desk.to(State.PREEMPTED, new_job(attachment=attached))
    assert desk.requeue(0, token) == Requeued("ok", 2, 3)


def test_a_job_that_nobody_watches_may_start_from_scratch(desk: Desk) -> None:
    desk.to(State.PREEMPTED, new_job(attachment=""))
    assert desk.requeue(0) == Requeued("ok", 2, 0)
    assert desk.log() == []


def test_a_repeated_requeue_answers_lost_with_the_same_epoch_and_resume(desk: Desk) -> None:
    desk.to(State.PREEMPTED)
    desk.requeue(1, ME)
    before = desk.look()
    assert desk.requeue(1, ME) == Requeued("lost", 2, 1)
    assert desk.requeue(0, ME) == Requeued("lost", 2, 1)
    assert desk.look() == before


def test_a_requeue_that_lost_to_the_sweep_hears_where_the_winner_resumed(desk: Desk) -> None:
    desk.to(State.PREEMPTED)
    assert desk.reap().requeued == (JOB,)
    assert desk.requeue(1, ME) == Requeued("lost", 2, 3)
    assert desk.view().ids == (7, 8, 9)


def test_a_requeue_that_comes_epochs_later_hears_of_the_last_one(desk: Desk) -> None:
    desk.to(State.PREEMPTED)
    desk.requeue(1, ME)
    desk.claim(P2)
    desk.handoff(2, P2, seq=1)
    desk.preempt(2, P2)
    assert desk.requeue(2, ME, epoch=2) == Requeued("ok", 3, 2)
    assert desk.requeue(0, ME, epoch=1) == Requeued("lost", 3, 2)


def test_the_entry_of_a_restarted_job_counts_the_tokens_that_stand(desk: Desk) -> None:
    desk.to(State.PREEMPTED)
    desk.requeue(2, ME)
    ((_, data),) = desk.entries(desk.keys.work("prefill")[2])
    assert data == {"id": JOB, "tok": "6", "al": "0"}  # a prompt of 4, and 2


def test_an_answer_to_an_older_preempt_does_not_answer_the_new_one(desk: Desk) -> None:
    desk.to(State.PREEMPTED)
    desk.requeue(1, ME)
    desk.claim(P2)
    desk.preempt(2, P2)
    before = desk.look()
    assert desk.requeue(0, ME, epoch=1) == Requeued("lost", 2, 1)
    assert desk.look() == before


@pytest.mark.parametrize("state", [*RUNNING, State.QUEUED])
def test_a_job_that_is_not_preempted_is_not_requeued(desk: Desk, state: State) -> None:
    desk.to(state)
    before = desk.look()
    assert desk.requeue(0, ME) == Requeued("lost", 1, 0)
    assert desk.look() == before


def test_a_requeue_of_a_job_that_is_over_or_unknown_says_so(desk: Desk) -> None:
    desk.to(State.DONE)
    assert desk.requeue(0, ME) == Requeued("done", 1, 4)
    assert desk.requeue(0, ME, job="unknown/0") == Requeued("gone", 0, 0)


def test_a_requeue_that_keeps_all_max_tokens_ends_instead_of_running(desk: Desk) -> None:
    desk.to(State.PREEMPTED, new_job(max_tokens=3))
    desk.listen(API)
    assert desk.requeue(-1, ME) == Requeued("ok", 2, 3)
    assert (desk.view().state, desk.view().reason) == ("done", "length")
    assert desk.heard() == [RequeuedEvent(JOB, 2, 3), EndedEvent(JOB, 2, 3, "length")]
    assert desk.requeue(-1, ME) == Requeued("done", 2, 3)


# finish


@pytest.mark.parametrize("state", RUNNING)
def test_the_owner_ends_the_job_with_its_last_tokens(desk: Desk, state: State) -> None:
    desk.to(state)
    desk.listen(API)
    desk.mind(P1)
    seq = SEQ[state]
    assert desk.finish(seq, (50, 51), owner=OWNER[state]) == "ok"
    view = desk.view()
    assert (view.state, view.reason, view.ids) == ("done", "stop", (*(7, 8, 9)[:seq], 50, 51))
    assert desk.heard() == [TokensEvent(JOB, 1, seq, (50, 51)), EndedEvent(JOB, 1, seq + 2, "stop")]
    assert desk.told(P1) == ([("release", JOB, 1)] if state in (State.STAGED, State.ADOPTING) else [])


def test_the_last_tokens_and_the_end_reach_the_viewer_in_one_entry(desk: Desk) -> None:
    desk.to(State.DECODE)
    desk.listen(API)
    desk.finish(3, (10,))
    assert len(desk.entries(desk.keys.live(API))) == 2


def test_a_repeated_finish_is_ok_and_adds_nothing(desk: Desk) -> None:
    desk.to(State.DECODE)
    desk.listen(API)
    assert desk.finish(3, (10,)) == "ok"
    log, heard = desk.log(), desk.heard()
    assert desk.finish(3, (10,)) == "ok"
    assert (desk.log(), desk.heard()) == (log, heard)


def test_a_finish_for_another_reason_than_the_one_that_stands_says_done(desk: Desk) -> None:
    desk.to(State.DECODE)
    desk.cancel()
    assert desk.finish(3, (10,)) == "done"
    assert desk.view().reason == "cancelled"


def test_a_finish_past_the_logs_end_is_a_gap_and_changes_nothing(desk: Desk) -> None:
    desk.to(State.DECODE)
    before = desk.look()
    assert desk.finish(5, (10,)) == "gap"
    assert desk.look() == before


def test_a_finish_that_repeats_tokens_that_stand_adds_only_the_new(desk: Desk) -> None:
    desk.to(State.DECODE)
    assert desk.finish(1, (8, 9, 10)) == "ok"
    assert desk.view().ids == (7, 8, 9, 10)


def test_an_error_carries_its_body_to_log_and_viewer(desk: Desk) -> None:
    desk.to(State.PREFILL)
    desk.listen(API)
    assert desk.finish(0, (), owner=P1, reason="error", error='{"code":"x"}') == "ok"
    assert desk.log() == [("1-0", {"f": "error", "e": '{"code":"x"}'})]
    assert desk.heard() == [EndedEvent(JOB, 1, 0, "error", '{"code":"x"}')]
    assert desk.view().error == '{"code":"x"}'


def test_after_the_end_both_keys_go_by_themselves_and_nothing_else_names_the_job(desk: Desk) -> None:
    desk.to(State.DONE)
    for key in (desk.keys.job(JOB), desk.keys.log(JOB)):
        assert 0 < desk.left_ms(key) <= RETENTION_MS
    desk.backend.forget(JOB)
    left = desk.look()
    assert all(key.startswith("work:") or key in ("domains", "apis", "drain") for key in left.names())
    assert desk.waiting() == {}
    assert all(pending == {} for pending, _ in left.groups.values())


# cancel


@pytest.mark.parametrize("token", ["", ME])
@pytest.mark.parametrize("state", LIVE)
def test_the_last_viewer_ends_the_job_in_any_state(desk: Desk, state: State, token: str) -> None:
    desk.to(state)
    desk.listen(API)
    desk.mind(P1, D1)
    ids = desk.view().ids
    assert desk.cancel(token) == "ended"
    view = desk.view()
    assert (view.state, view.reason, view.ids) == ("done", "cancelled", ids)
    assert desk.waiting() == {}
    assert ends(desk) == ([EndedEvent(JOB, 1, len(ids), "cancelled")] if token == "" else [])
    stop, release = ("stop", JOB, 1), ("release", JOB, 1)
    expected = {
        State.QUEUED: ([], []),
        State.PREFILL: ([stop], []),
        State.STAGED: ([stop, release], []),
        State.ADOPTING: ([release], [stop]),
        State.DECODE: ([], [stop]),
        State.PREEMPTED: ([], [stop]),
    }
    assert (desk.told(P1), desk.told(D1)) == expected[state]


def test_one_of_two_viewers_detaches_and_the_job_goes_on(desk: Desk) -> None:
    other = f"{API}#2"
    desk.to(State.DECODE, new_job(attachment=f"{ME} {other}"))
    assert desk.cancel(ME) == "watched"
    assert desk.cancel(ME) == "watched"
    assert desk.fields()["at"] == other
    assert desk.emit(3, (10,)).code == "ok"
    assert desk.cancel(other) == "ended"


def test_a_stranger_does_not_cancel_what_others_watch(desk: Desk) -> None:
    desk.to(State.DECODE)
    assert desk.cancel("api:9:z#9") == "watched"
    assert desk.fields()["st"] == "decode"


def test_a_stranger_does_not_cancel_a_job_that_never_had_a_viewer(desk: Desk) -> None:
    desk.to(State.DECODE, new_job(attachment=""))
    assert desk.cancel(ME) == "watched"
    assert desk.cancel("") == "ended"


def test_a_repeated_cancel_says_done_and_adds_nothing(desk: Desk) -> None:
    desk.to(State.DECODE)
    assert desk.cancel(ME) == "ended"
    log = desk.log()
    assert desk.cancel(ME) == "done"
    assert desk.cancel("") == "done"
    assert desk.log() == log
    assert desk.cancel(ME, job="unknown/0") == "gone"
