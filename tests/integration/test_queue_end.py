"""Contracts of requeue, finish, cancel and reap, on both servers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from prelay_queue.events import EndedEvent, RequeuedEvent, TokensEvent
from prelay_queue.scripts import Reaped, Requeued
from prelay_queue.state import SWEPT_IN, State
from tests.bed.servers import Server
from tests.integration.queue_desk import API, D1, DOMAIN, JOB, LEASE_MS, P1, P2, Desk, at_desk, new_job

ME = f"{API}#1"
RETENTION_MS = 300_000
LIVE = [state for state in State if state is not State.DONE]
RUNNING = [state for state in LIVE if SWEPT_IN[state] == "leases"]
OWNER = {State.PREFILL: P1, State.STAGED: P1, State.ADOPTING: D1, State.DECODE: D1}
SEQ = {State.PREFILL: 0, State.STAGED: 1, State.ADOPTING: 1, State.DECODE: 3}


@pytest.fixture
def desk(any_server: Server) -> Iterator[Desk]:
    yield from at_desk(any_server)


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
    before = desk.snapshot()
    assert desk.requeue(1, ME) == Requeued("lost", 2, 1)
    assert desk.requeue(0, ME) == Requeued("lost", 2, 1)
    assert desk.snapshot() == before


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


@pytest.mark.parametrize("state", [*RUNNING, State.QUEUED])
def test_a_job_that_is_not_preempted_is_not_requeued(desk: Desk, state: State) -> None:
    desk.to(state)
    before = desk.snapshot()
    assert desk.requeue(0, ME) == Requeued("lost", 1, 0)
    assert desk.snapshot() == before


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
    assert desk.redis.xlen(desk.keys.live(API)) == 2


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
    before = desk.snapshot()
    assert desk.finish(5, (10,)) == "gap"
    assert desk.snapshot() == before


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
        assert 0 < desk.redis.pttl(key) <= RETENTION_MS
        desk.redis.pexpire(key, 0)
    left = desk.snapshot()
    assert all(key.startswith("work:") or key == "domains" for key in left)
    assert desk.waiting() == {}
    for stream in (key for key in left if key.startswith("work:")):
        assert desk.redis.xpending(desk.keys.prefix + stream, "g")["pending"] == 0


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


# reap


@pytest.mark.parametrize("state", RUNNING)
def test_a_job_whose_lease_ended_starts_again_with_all_that_was_emitted(desk: Desk, state: State) -> None:
    desk.to(state)
    desk.listen(API)
    desk.mind(P1, D1)
    ids = desk.view().ids
    assert desk.crash() == Reaped(reaped=(JOB,))
    fields = desk.fields()
    assert (fields["st"], fields["ep"], fields["ow"]) == ("queued", "2", "")
    assert desk.view().ids == ids
    assert desk.heard() == [RequeuedEvent(JOB, 2, len(ids))]
    assert desk.waiting() == {"work:prefill:normal:r": [JOB]}
    assert ("stop", JOB, 1) in desk.told(OWNER[state])
    released = ("release", JOB, 1) in desk.told(P1)
    assert released == (state in (State.STAGED, State.ADOPTING))


def test_a_lease_that_runs_is_left_alone(desk: Desk) -> None:
    desk.to(State.DECODE)
    before = desk.snapshot()
    assert desk.reap() == Reaped()
    assert desk.snapshot() == before


def test_a_second_sweep_finds_nothing(desk: Desk) -> None:
    desk.to(State.DECODE)
    desk.expire_lease()
    assert desk.reap(check_ms=10**9).reaped == (JOB,)
    before = desk.snapshot()
    assert desk.reap(check_ms=10**9) == Reaped()
    assert desk.snapshot() == before


def test_a_sweep_takes_no_more_than_its_limit_and_the_next_one_the_rest(desk: Desk) -> None:
    for i in range(5):
        desk.to(State.PREFILL, new_job(f"r/{i}"))
        desk.expire_lease(f"r/{i}")
    assert len(desk.reap(limit=3, check_ms=10**9).reaped) == 3
    assert len(desk.reap(limit=3, check_ms=10**9).reaped) == 2


def run_to_decode(desk: Desk, epoch: int) -> bool:
    """Claim, hand over and adopt; True when the job runs alone."""
    claim = desk.claim(P1).claim
    assert claim is not None
    assert claim.epoch == epoch
    assert desk.handoff(epoch, P1, seq=len(claim.ids)) == "ok"
    assert desk.claim(D1, f"decode:{DOMAIN}").code == "ok"
    assert desk.adopt(epoch) == "ok"
    return claim.alone


def test_after_two_crashes_in_company_a_job_runs_alone_and_two_more_end_it(desk: Desk) -> None:
    desk.listen(API)
    desk.submit()
    alone = []
    for epoch in (1, 2, 3):
        alone.append(run_to_decode(desk, epoch))
        assert desk.crash().reaped == (JOB,)
    alone.append(run_to_decode(desk, 4))
    assert alone == [False, False, True, True]
    assert desk.crash() == Reaped(dead=(JOB,))
    view = desk.view()
    assert (view.state, view.reason, view.error) == ("done", "error", '{"code":"crashed"}')
    assert ends(desk) == [EndedEvent(JOB, 4, 4, "error", '{"code":"crashed"}')]
    ((_, letter),) = desk.redis.xrange(desk.keys.dead)
    assert letter[b"id"] == JOB.encode()


def test_the_entry_of_a_job_that_must_run_alone_says_so(desk: Desk) -> None:
    desk.submit()
    for epoch in (1, 2):
        run_to_decode(desk, epoch)
        desk.crash()
    ((_, data),) = desk.redis.xrange(desk.keys.work("prefill")[2])
    assert data[b"al"] == b"1"


def test_the_death_of_an_exporter_is_no_crash_of_the_jobs_that_wait_there(desk: Desk) -> None:
    desk.to(State.STAGED)
    for epoch in range(2, 8):
        assert desk.crash().reaped == (JOB,)
        claim = desk.claim(P1).claim
        assert claim is not None
        assert not claim.alone
        assert desk.handoff(epoch, P1, seq=len(claim.ids)) == "ok"
    assert desk.fields()["cr"] == desk.fields()["ca"] == "0"


def test_preempts_are_no_crashes(desk: Desk) -> None:
    desk.to(State.DECODE)
    for epoch in range(1, 6):
        desk.preempt(epoch)
        desk.requeue(-1, ME, epoch=epoch)
        assert run_to_decode(desk, epoch + 1) is False


def test_a_crash_that_lost_no_token_of_a_complete_answer_ends_it(desk: Desk) -> None:
    desk.to(State.DECODE, new_job(max_tokens=3))
    assert desk.crash().reaped == (JOB,)
    assert (desk.view().state, desk.view().reason) == ("done", "length")


def test_an_unanswered_preempt_is_requeued_after_its_grace_and_not_before(desk: Desk) -> None:
    desk.to(State.PREEMPTED)
    desk.listen(API)
    assert desk.reap(grace_ms=60_000) == Reaped()
    assert desk.reap(grace_ms=0) == Reaped(requeued=(JOB,))
    assert desk.heard() == [RequeuedEvent(JOB, 2, 3)]
    assert desk.reap(grace_ms=0, check_ms=10**9) == Reaped()


def test_a_queued_job_past_its_deadline_ends_without_a_worker(desk: Desk) -> None:
    desk.to(State.QUEUED, new_job(ttl_ms=60_000))
    desk.listen(API)
    assert desk.reap() == Reaped()
    desk.redis.hset(desk.keys.job(JOB), "dl", 1)
    desk.reap()
    assert ends(desk) == [EndedEvent(JOB, 1, 0, "deadline")]
    assert desk.waiting() == {}


def test_index_members_without_a_job_are_swept_away(desk: Desk) -> None:
    for index in (desk.keys.leases, desk.keys.preempted, desk.keys.queued):
        desk.redis.zadd(index, {"nobody/0": 1})
    assert desk.reap() == Reaped()
    desk.check()
    assert desk.snapshot().keys() & {"leases", "preempted", "queued"} == set()


def test_a_sweep_of_nothing_does_nothing(desk: Desk) -> None:
    before = desk.snapshot()
    assert desk.reap() == Reaped()
    assert desk.snapshot() == before


def test_a_rebuilt_job_can_crash_and_go_on(desk: Desk) -> None:
    desk.submit(replace(new_job(), epoch=3, ids=(7, 8)))
    desk.claim(P1)
    assert desk.crash().reaped == (JOB,)
    claim = desk.claim(P2).claim
    assert claim is not None
    assert (claim.epoch, claim.ids) == (4, (7, 8))
    assert desk.lease_left_ms() <= LEASE_MS


def test_a_job_that_got_past_the_step_where_it_crashed_has_company_again(desk: Desk) -> None:
    desk.submit()
    for epoch in (1, 2):
        run_to_decode(desk, epoch)
        desk.crash()
    assert run_to_decode(desk, 3) is True
    desk.emit(3, (20, 21, 22, 23), epoch=3)  # 7 stand; it crashed at 2
    desk.preempt(3)
    desk.requeue(-1, ME, epoch=3)
    assert run_to_decode(desk, 4) is False
    desk.crash()
    assert (desk.fields()["cr"], desk.fields()["ca"]) == ("3", "0")
    assert run_to_decode(desk, 5) is True  # it crashed at a later step: alone until past that


def test_a_job_that_crashes_a_little_later_each_time_is_given_up_too(desk: Desk) -> None:
    desk.submit(new_job(max_tokens=100))
    for epoch in range(1, 8):
        run_to_decode(desk, epoch)
        seq = len(desk.view().ids)
        desk.emit(seq, tuple(range(6)), epoch=epoch)
        assert desk.crash().reaped == (JOB,)
    run_to_decode(desk, 8)
    assert desk.crash().dead == (JOB,)


def test_a_sweep_that_was_held_up_on_its_way_does_nothing(desk: Desk) -> None:
    desk.to(State.DECODE)
    desk.expire_lease()
    before = desk.snapshot()
    late, in_time = desk.now_ms() - 1, desk.now_ms() + 60_000
    assert desk.run(desk.scripts.reap(100, 0, 10**9, 2, "", late)) == Reaped()
    assert desk.snapshot() == before
    assert desk.run(desk.scripts.reap(100, 0, 10**9, 2, "", in_time)).reaped == (JOB,)
