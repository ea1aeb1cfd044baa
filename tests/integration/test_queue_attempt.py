"""Contracts of handoff, adopt, emit, preempt and renew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from prelay_queue.events import PreemptedEvent, TokensEvent
from prelay_queue.scripts import Emission, Emitted, Held
from prelay_queue.state import State
from tests.integration.queue_desk import API, D1, D2, DOMAIN, JOB, LEASE_MS, OTHER_API, P1, P2, Desk, new_job

OWNER = {State.PREFILL: P1, State.STAGED: P1, State.ADOPTING: D1, State.DECODE: D1}
Write = Callable[[Desk, int, str], str]

#: Every write of a worker, for the fences that they share. Called with (desk, epoch, owner).
WRITES: dict[str, Write] = {
    "handoff": lambda desk, epoch, owner: desk.handoff(epoch, owner),
    "adopt": lambda desk, epoch, owner: desk.adopt(epoch, owner),
    "emit": lambda desk, epoch, owner: desk.emit(0, (1,), epoch, owner).code,
    "preempt": lambda desk, epoch, owner: desk.preempt(epoch, owner),
    "finish": lambda desk, epoch, owner: desk.finish(0, (1,), epoch, owner),
}


# The fence that all writes share.


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("state", [s for s in State if s is not State.DONE])
def test_a_write_of_another_epoch_or_owner_is_fenced_and_changes_nothing(desk: Desk, state: State, write: str) -> None:
    desk.to(state)
    before = desk.look()
    owner = OWNER.get(state, D1)
    for epoch, name in ((0, owner), (2, owner), (1, P2), (1, D2), (1, "")):
        assert WRITES[write](desk, epoch, name) == "fenced", (epoch, name)
    assert desk.look() == before


@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_a_job_that_is_over_says_done(desk: Desk, write: str) -> None:
    desk.to(State.DONE)
    desk.checked = False
    before = desk.look()
    for epoch, owner in ((0, D1), (2, D1), (1, P1)):
        assert WRITES[write](desk, epoch, owner) == "done"
    assert desk.look().names() == before.names()
    desk.check()


@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_a_job_that_redis_does_not_know_says_gone(desk: Desk, write: str) -> None:
    before = desk.look()
    assert WRITES[write](desk, 1, P1) == "gone"
    assert desk.look() == before


@pytest.mark.parametrize(
    ("write", "state"),
    [
        ("handoff", State.ADOPTING),  # by the decode worker that owns it
        ("handoff", State.DECODE),
        ("adopt", State.STAGED),
        ("emit", State.PREFILL),
        ("emit", State.STAGED),
        ("emit", State.ADOPTING),
    ],
)
def test_a_write_of_the_owner_in_the_wrong_state_is_illegal_and_changes_nothing(
    desk: Desk, write: str, state: State
) -> None:
    desk.to(state)
    before = desk.look()
    assert WRITES[write](desk, 1, OWNER[state]) == "illegal"
    assert desk.look() == before


def test_after_a_preempt_its_owner_may_write_nothing_more(desk: Desk) -> None:
    desk.to(State.PREEMPTED)
    before = desk.look()
    assert desk.handoff(1, D1, seq=3) == "illegal"
    assert desk.adopt() == "illegal"
    assert desk.emit(3, (10,)) == Emitted("illegal", 0)
    assert desk.finish(3, (10,)) == "illegal"
    assert desk.look() == before


# handoff


def test_a_handoff_emits_the_first_token_and_stages_the_job(desk: Desk) -> None:
    desk.to(State.PREFILL)
    desk.listen(API)
    assert desk.handoff() == "ok"
    fields = desk.fields()
    assert (fields["st"], fields["kv"], fields["kvo"], fields["kve"]) == ("staged", "kv of r/0@1", P1, "1")
    assert desk.waiting() == {f"work:decode:{DOMAIN}:normal:n": [JOB]}
    assert desk.log() == [("1-0", {"t": "7"})]
    assert desk.heard() == [TokensEvent(JOB, 1, 0, (7,))]
    assert desk.look().domains == {DOMAIN}


def test_a_note_stands_beside_its_token_and_is_told_with_it(desk: Desk) -> None:
    desk.to(State.PREFILL)
    desk.listen(API)
    assert desk.run(desk.scripts.handoff(JOB, 1, P1, 0, 7, b"kv", DOMAIN, LEASE_MS, "n7")) == "ok"
    claim = desk.claim(D1, f"decode:{DOMAIN}").claim
    assert claim is not None
    assert claim.ids == (7,)
    assert desk.adopt() == "ok"
    for _ in range(2):  # as after a lost reply
        (answer,) = desk.run(desk.scripts.emit(D1, [Emission(JOB, 1, 0, (7, 8, 9), ("n7", "", "n9"))]))
        assert answer == Emitted("ok", 3)
    assert desk.run(desk.scripts.finish(JOB, 1, D1, 2, (9, 10), "stop", notes=("n9", "n10"))) == "ok"
    assert desk.log()[:4] == [
        ("1-0", {"t": "7", "x": "n7"}), ("1-1", {"t": "8"}), ("1-2", {"t": "9", "x": "n9"}),
        ("1-3", {"t": "10", "x": "n10"}),
    ]  # fmt: skip
    assert desk.heard()[:3] == [
        TokensEvent(JOB, 1, 0, (7,), ("n7",)),
        TokensEvent(JOB, 1, 1, (8, 9), ("", "n9")),
        TokensEvent(JOB, 1, 3, (10,), ("n10",)),
    ]
    view = desk.run(desk.scripts.view(JOB))
    assert view is not None
    assert (view.ids, view.notes) == ((7, 8, 9, 10), ("n7", "", "n9", "n10"))


def test_a_preempt_discards_notes_with_their_tokens_and_a_lost_job_comes_back_with_both(desk: Desk) -> None:
    desk.to(State.DECODE, new_job(attachment=f"{API}#t"))
    desk.run(desk.scripts.emit(D1, [Emission(JOB, 1, 3, (10, 11), ("n10", "n11"))]))
    assert desk.preempt() == "ok"
    assert desk.requeue(4, f"{API}#t").resume == 4
    view = desk.run(desk.scripts.view(JOB))
    assert view is not None
    assert (view.ids, view.notes) == ((7, 8, 9, 10), ("", "", "", "n10"))
    desk.backend.lose_everything()
    desk.make_groups("prefill")
    assert desk.submit(replace(new_job(), epoch=3, ids=view.ids, notes=view.notes)) == ("new",)
    assert desk.run(desk.scripts.view(JOB)) == replace(view, epoch=3, resume=4, epochs=(3,) * 4)


def test_a_restarted_job_is_staged_before_the_new_ones(desk: Desk) -> None:
    desk.to(State.PREFILL)
    desk.crash()
    assert desk.claim(P2).code == "ok"
    assert desk.handoff(2, P2) == "ok"
    assert desk.waiting() == {f"work:decode:{DOMAIN}:normal:r": [JOB]}


def test_a_repeated_handoff_is_ok_and_changes_nothing(desk: Desk) -> None:
    desk.to(State.STAGED)
    before = desk.look()
    assert desk.handoff() == "ok"
    assert desk.look() == before


def test_a_handoff_repeated_while_the_copy_runs_is_still_ok(desk: Desk) -> None:
    desk.to(State.ADOPTING)
    before = desk.look()
    assert desk.handoff() == "ok"
    assert desk.look() == before


def test_a_handoff_repeated_after_the_adoption_is_fenced_for_the_export_is_over(desk: Desk) -> None:
    desk.to(State.DECODE)
    assert desk.handoff() == "fenced"
    assert desk.renew(P1, "export") == "release"


def test_a_handoff_past_the_logs_end_is_a_gap(desk: Desk) -> None:
    desk.to(State.PREFILL)
    before = desk.look()
    assert desk.handoff(seq=1) == "gap"
    assert desk.look() == before


# adopt


def test_an_adoption_tells_the_exporter_that_it_may_free(desk: Desk) -> None:
    desk.to(State.ADOPTING)
    desk.mind(P1)
    assert desk.adopt() == "ok"
    assert desk.told(P1) == [("release", JOB, 1)]
    assert desk.fields()["st"] == "decode"
    assert 0 < desk.lease_left_ms() <= LEASE_MS


def test_a_repeated_adoption_is_ok_and_says_nothing_twice(desk: Desk) -> None:
    desk.to(State.ADOPTING)
    desk.mind(P1)
    desk.adopt()
    before = desk.look()
    assert desk.adopt() == "ok"
    assert desk.look() == before


def test_a_unified_worker_adopts_what_it_prefills(desk: Desk) -> None:
    desk.to(State.PREFILL)
    assert desk.adopt(1, P1) == "ok"
    assert desk.emit(0, (7, 8), 1, P1) == Emitted("ok", 2)
    assert desk.adopt(1, P1) == "ok"


# emit


def test_an_emission_lengthens_the_log_and_answers_with_the_next_seq(desk: Desk) -> None:
    desk.to(State.DECODE)
    assert desk.emit(3, (10, 11)) == Emitted("ok", 5)
    assert [entry for entry, _ in desk.log()] == [f"1-{i}" for i in range(5)]
    assert desk.view().ids == (7, 8, 9, 10, 11)


def test_a_repeated_emission_is_ok_and_changes_nothing(desk: Desk) -> None:
    desk.to(State.DECODE)
    desk.listen(API)
    assert desk.emit(3, (10, 11)) == Emitted("ok", 5)
    before = desk.look()
    assert desk.emit(3, (10, 11)) == Emitted("ok", 5)
    assert desk.emit(4, (11,)) == Emitted("ok", 5)
    assert desk.emit(5, ()) == Emitted("ok", 5)
    assert desk.look() == before


def test_a_rebatched_emission_adds_only_what_is_new(desk: Desk) -> None:
    desk.to(State.DECODE)
    desk.listen(API)
    assert desk.emit(1, (8, 9, 10, 11)) == Emitted("ok", 5)
    assert desk.heard() == [TokensEvent(JOB, 1, 3, (10, 11))]


def test_an_emission_past_the_end_is_a_gap_and_adds_nothing(desk: Desk) -> None:
    desk.to(State.DECODE)
    before = desk.look()
    assert desk.emit(4, (11,)) == Emitted("gap", 3)
    assert desk.look() == before


def test_one_call_carries_a_whole_step_and_answers_each_job_by_itself(desk: Desk) -> None:
    for name in ("a/0", "b/0", "c/0"):
        desk.to(State.DECODE, new_job(name))
    desk.preempt(job="b/0")
    step = [Emission(name, 1, 3, (10,)) for name in ("a/0", "b/0", "unknown/0", "c/0")]
    answers = desk.run(desk.scripts.emit(D1, step))
    assert answers == [Emitted("ok", 4), Emitted("illegal", 0), Emitted("gone", 0), Emitted("ok", 4)]
    assert (desk.view("a/0").ids, desk.view("c/0").ids) == ((7, 8, 9, 10),) * 2


def test_a_step_reaches_each_api_process_as_one_entry(desk: Desk) -> None:
    desk.to(State.DECODE, new_job("a/0", attachment=f"{API}#1"))
    desk.to(State.DECODE, new_job("b/0", attachment=f"{API}#2 {OTHER_API}#3"))
    desk.listen(API, OTHER_API)
    desk.run(desk.scripts.emit(D1, [Emission("a/0", 1, 3, (10,)), Emission("b/0", 1, 3, (20, 21))]))
    both = [TokensEvent("a/0", 1, 3, (10,)), TokensEvent("b/0", 1, 3, (20, 21))]
    assert desk.heard(API) == both
    assert desk.heard(OTHER_API) == both[1:]
    assert len(desk.entries(desk.keys.live(API))) == 2  # the first is the test's own


def test_two_viewers_in_one_api_process_are_told_once(desk: Desk) -> None:
    desk.to(State.DECODE, new_job(attachment=f"{API}#1 {API}#2"))
    desk.listen(API)
    desk.emit(3, (10,))
    assert desk.heard() == [TokensEvent(JOB, 1, 3, (10,))]


def test_nothing_is_written_for_an_api_process_that_is_gone(desk: Desk) -> None:
    desk.to(State.DECODE)
    desk.emit(3, (10,))
    assert not desk.has(desk.keys.live(API))


# preempt


@pytest.mark.parametrize("state", [State.PREFILL, State.STAGED, State.ADOPTING, State.DECODE])
def test_the_owner_gives_a_job_up_in_any_running_state(desk: Desk, state: State) -> None:
    desk.to(state)
    desk.listen(API)
    desk.mind(P1)
    assert desk.preempt(owner=OWNER[state]) == "ok"
    fields = desk.fields()
    assert (fields["st"], fields["pe"], fields["why"]) == ("preempted", "1", "kv")
    assert desk.heard() == [PreemptedEvent(JOB, 1, "kv")]
    exported = state in (State.STAGED, State.ADOPTING)
    assert desk.told(P1) == ([("release", JOB, 1)] if exported else [])


def test_a_repeated_preempt_is_ok_and_counts_once(desk: Desk) -> None:
    desk.to(State.PREEMPTED)
    before = desk.look()
    assert desk.preempt() == "ok"
    assert desk.look() == before


def test_a_preempt_repeated_after_the_requeue_is_fenced(desk: Desk) -> None:
    desk.to(State.PREEMPTED)
    desk.requeue(-1)
    before = desk.look()
    assert desk.preempt() == "fenced"
    assert desk.look() == before


def test_hand_overs_that_fail_in_a_row_are_counted_apart_from_other_preempts(desk: Desk) -> None:
    def failed_after(reason: str) -> int:
        """The job comes to decode, is given up there, and comes back."""
        epoch = int(desk.fields()["ep"])
        assert desk.run(desk.scripts.preempt(JOB, epoch, D1, reason)) == "ok"
        desk.requeue(-1, epoch=epoch)
        claim = desk.claim(P1).claim
        assert claim is not None
        assert desk.handoff(epoch + 1, seq=len(claim.ids)) == "ok"
        assert desk.claim(D1, f"decode:{DOMAIN}").claim is not None
        return claim.failed_handovers

    desk.to(State.ADOPTING)
    assert [failed_after(why) for why in ("hand-over: gone", "admin", "hand-over: gone", "kv")] == [1, 1, 2, 2]
    assert desk.adopt(epoch=5) == "ok"
    assert failed_after("admin") == 0
    assert desk.fields()["pe"] == "5"


# renew


@pytest.mark.parametrize("state", [State.PREFILL, State.STAGED, State.ADOPTING, State.DECODE])
def test_a_renewal_of_the_owner_lengthens_the_lease(desk: Desk, state: State) -> None:
    desk.to(state)
    desk.leave_lease(1)
    assert desk.renew(OWNER[state]) == "kept"
    assert desk.lease_left_ms() > LEASE_MS / 2


def test_a_renewal_is_lost_for_another_epoch_another_owner_a_preempt_or_an_unknown_job(desk: Desk) -> None:
    desk.to(State.DECODE)
    before = desk.look()
    assert desk.renew(D1, epoch=2) == "lost"
    assert desk.renew(D1, epoch=0) == "lost"
    assert desk.renew(D2) == "lost"
    assert desk.renew(D1, job="unknown/0") == "lost"
    assert desk.look() == before
    desk.preempt()
    assert desk.renew(D1) == "lost"


def test_a_renewal_does_not_bring_a_reaped_job_back(desk: Desk) -> None:
    desk.to(State.DECODE)
    desk.crash()
    assert desk.renew(D1) == "lost"
    assert "leases" not in desk.look().scores


def test_a_renewal_of_a_job_that_is_over_says_done(desk: Desk) -> None:
    desk.to(State.DONE)
    assert desk.renew(D1) == "done"
    assert desk.renew(P1, "export") == "release"


def test_the_exporter_keeps_a_staged_job_alive_while_it_waits(desk: Desk) -> None:
    desk.to(State.STAGED)
    desk.leave_lease(1)
    assert desk.renew(P1, "export") == "hold"
    assert desk.lease_left_ms() > LEASE_MS / 2


def test_the_exporter_holds_during_the_copy_but_does_not_renew_for_the_one_who_copies(desk: Desk) -> None:
    desk.to(State.ADOPTING)
    desk.leave_lease(5_000)
    assert desk.renew(P1, "export") == "hold"
    assert desk.lease_left_ms() <= 5_000


@pytest.mark.parametrize("end", ["adopt", "preempt", "finish", "cancel", "reap"])
def test_an_export_is_released_when_nobody_will_read_it_any_more(desk: Desk, end: str) -> None:
    desk.to(State.ADOPTING)
    ends: dict[str, Callable[[], object]] = {
        "adopt": desk.adopt,
        "preempt": desk.preempt,
        "finish": lambda: desk.finish(1),
        "cancel": desk.cancel,
        "reap": desk.crash,
    }
    ends[end]()
    assert desk.renew(P1, "export") == "release"


def test_an_export_of_an_older_epoch_is_released(desk: Desk) -> None:
    desk.to(State.STAGED)
    desk.crash()
    assert desk.claim(P1).code == "ok"
    assert desk.handoff(2, P1, seq=1) == "ok"
    assert desk.renew(P1, "export", epoch=1) == "release"
    assert desk.renew(P1, "export", epoch=2) == "hold"


def test_one_renewal_answers_everything_that_a_worker_holds(desk: Desk) -> None:
    desk.to(State.DECODE, new_job("a/0"))
    desk.to(State.ADOPTING, new_job("b/0"))
    desk.to(State.DONE, new_job("c/0"))
    held = [Held("a/0", 1, "run"), Held("b/0", 1, "run"), Held("c/0", 1, "run"), Held("d/0", 1, "run")]
    assert desk.run(desk.scripts.renew(D1, LEASE_MS, held)) == ("kept", "kept", "done", "lost")
    assert desk.run(desk.scripts.renew(D1, LEASE_MS, [])) == ()
