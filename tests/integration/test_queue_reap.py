"""Contract of reap,: what a sweep gives back, counts and gives up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prelay_queue.events import EndedEvent, RequeuedEvent
from prelay_queue.scripts import Reaped
from prelay_queue.state import SWEPT_IN, State
from tests.integration.queue_desk import API, D1, DOMAIN, JOB, LEASE_MS, P1, P2, Desk, new_job

ME = f"{API}#1"

RUNNING = [state for state in State if SWEPT_IN.get(state) == "leases"]
OWNER = {State.PREFILL: P1, State.STAGED: P1, State.ADOPTING: D1, State.DECODE: D1}


def ends(desk: Desk) -> list[EndedEvent]:
    return [event for event in desk.heard() if isinstance(event, EndedEvent)]


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
    before = desk.look()
    assert desk.reap() == Reaped()
    assert desk.look() == before


def test_a_second_sweep_finds_nothing(desk: Desk) -> None:
    desk.to(State.DECODE)
    desk.expire_lease()
    assert desk.reap(check_ms=10**9).reaped == (JOB,)
    before = desk.look()
    assert desk.reap(check_ms=10**9) == Reaped()
    assert desk.look() == before


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
    ((_, letter),) = desk.entries(desk.keys.dead)
    assert letter == {
        "id": JOB, "why": "2 crashes in company, 2 alone", "spec": new_job().spec.encode().decode(), "vw": "",
    }  # fmt: skip


def test_a_dead_letter_does_not_keep_a_job_that_is_too_long(desk: Desk) -> None:
    desk.submit(new_job(prompt=range(100_000, 110_000)))
    for epoch in (1, 2, 3, 4):
        run_to_decode(desk, epoch)
        desk.crash()
    ((_, letter),) = desk.entries(desk.keys.dead)
    assert (letter["id"], letter["spec"]) == (JOB, "")


def test_the_entry_of_a_job_that_must_run_alone_says_so(desk: Desk) -> None:
    desk.submit()
    for epoch in (1, 2):
        run_to_decode(desk, epoch)
        desk.crash()
    ((_, data),) = desk.entries(desk.keys.work("prefill")[2])
    assert data["al"] == "1"


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


def test_a_queued_job_is_looked_at_again_only_after_the_time_between_two_checks(desk: Desk) -> None:
    desk.to(State.QUEUED)
    desk.backend.set_score("queued", JOB, desk.now_ms() - 60_000)
    assert desk.reap(check_ms=30_000) == Reaped()
    assert desk.look().scores["queued"][JOB] > desk.now_ms() - 30_000


def test_index_members_without_a_job_are_swept_away(desk: Desk) -> None:
    for index in ("leases", "preempted", "queued"):
        desk.backend.set_score(index, "nobody/0", 1)
    assert desk.reap() == Reaped()
    desk.check()
    assert desk.look().scores == {}


def test_a_sweep_of_nothing_does_nothing(desk: Desk) -> None:
    before = desk.look()
    assert desk.reap() == Reaped()
    assert desk.look() == before


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
    before = desk.look()
    late, in_time = desk.now_ms() - 1, desk.now_ms() + 60_000
    assert desk.run(desk.scripts.reap(100, 0, 10**9, 2, "", late)) == Reaped()
    assert desk.look() == before
    assert desk.run(desk.scripts.reap(100, 0, 10**9, 2, "", in_time)).reaped == (JOB,)
