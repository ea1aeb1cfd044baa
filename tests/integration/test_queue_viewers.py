"""Who watches a job: an API process that dies watches nothing any more, after a grace."""

from __future__ import annotations

import orjson
import pytest

from prelay_queue.job import JobSpec
from prelay_queue.scripts import Reaped
from prelay_queue.state import State
from tests.integration.queue_desk import API, JOB, OTHER_API, Desk, new_job

GRACE_MS = 30_000


def sweep(desk: Desk) -> Reaped:
    return desk.reap(grace_ms=10**9, check_ms=10**9)


@pytest.mark.parametrize("state", [state for state in State if state is not State.DONE])
def test_what_only_a_dead_api_process_watched_ends_after_the_grace(desk: Desk, state: State) -> None:
    desk.to(state)
    desk.last_heard(API, GRACE_MS - 5_000)
    assert sweep(desk) == Reaped()
    desk.last_heard(API, GRACE_MS + 5_000)
    assert sweep(desk) == Reaped(abandoned=(JOB,))
    view = desk.view()
    assert (view.state, view.reason) == (State.DONE, "cancelled")
    assert sweep(desk) == Reaped()


def test_the_worker_of_an_abandoned_job_is_told_to_stop(desk: Desk) -> None:
    claim = desk.to(State.DECODE)
    desk.mind("decode:1:a")
    desk.last_heard(API, 2 * GRACE_MS)
    sweep(desk)
    assert desk.told("decode:1:a") == [("stop", JOB, claim.epoch)]


def test_a_job_that_a_living_process_watches_too_goes_on(desk: Desk) -> None:
    desk.to(State.DECODE, new_job(attachment=f"{API}#1 {OTHER_API}#2"))
    desk.last_heard(API, 2 * GRACE_MS)
    assert sweep(desk) == Reaped()
    assert desk.fields()["at"] == f"{OTHER_API}#2"
    desk.last_heard(OTHER_API, 2 * GRACE_MS)
    assert sweep(desk) == Reaped(abandoned=(JOB,))


def test_a_job_that_nobody_ever_watched_is_not_ended_by_anybodys_death(desk: Desk) -> None:
    desk.to(State.DECODE, new_job(attachment=""))
    desk.last_heard(API, 2 * GRACE_MS)
    assert sweep(desk) == Reaped()
    assert desk.fields()["st"] == State.DECODE


def test_a_process_whose_name_begins_like_the_dead_one_lives_on(desk: Desk) -> None:
    desk.to(State.DECODE, new_job(attachment=f"{API}b#1"))
    desk.last_heard(API, 2 * GRACE_MS)
    assert sweep(desk) == Reaped()


def test_a_process_that_dies_before_it_ever_said_that_it_lives_is_missed_too(desk: Desk) -> None:
    desk.submit()
    assert desk.look().scores["apis"][API] == pytest.approx(desk.now_ms(), abs=5_000)


def test_a_submit_does_not_stand_for_a_heartbeat(desk: Desk) -> None:
    """Its process may be long dead: a proxy may have held the submit up."""
    desk.last_heard(API, 10_000)
    desk.submit()
    assert desk.look().scores["apis"][API] == pytest.approx(desk.now_ms() - 10_000, abs=5_000)


def test_attending_makes_a_process_live_again(desk: Desk) -> None:
    desk.to(State.DECODE)
    desk.last_heard(API, 2 * GRACE_MS)
    desk.run(desk.scripts.attend(API, 30, begin=False))
    assert sweep(desk) == Reaped()


def test_the_dead_are_forgotten(desk: Desk) -> None:
    for api in (API, OTHER_API):
        desk.last_heard(api, 2 * GRACE_MS)
    sweep(desk)
    sweep(desk)
    assert "apis" not in desk.look().scores


def test_another_viewer_learns_all_that_it_needs_and_the_job_outlives_the_first(desk: Desk) -> None:
    desk.to(State.DECODE, new_job(form='{"how": "it is shown"}'))
    found = desk.run(desk.scripts.attach(JOB, f"{OTHER_API}#9"))
    assert found is not None
    assert (found.state, found.form, found.choices, found.ttl_ms) == (State.DECODE, '{"how": "it is shown"}', 1, 0)
    assert JobSpec.decode(found.spec) == new_job().spec
    assert desk.run(desk.scripts.cancel(JOB, f"{API}#1")) == "watched"
    assert desk.fields()["at"] == f"{OTHER_API}#9"
    assert desk.look().scores["apis"][OTHER_API] == pytest.approx(desk.now_ms(), abs=5_000)
    assert desk.run(desk.scripts.cancel(JOB, f"{OTHER_API}#9")) == "ended"


def test_to_attach_twice_is_to_attach_once(desk: Desk) -> None:
    desk.submit()
    for _ in range(2):
        desk.run(desk.scripts.attach(JOB, f"{OTHER_API}#9"))
    assert desk.fields()["at"] == f"{API}#1 {OTHER_API}#9"


def test_a_job_that_is_over_takes_no_viewer_but_says_how_it_is_shown(desk: Desk) -> None:
    desk.to(State.DONE, new_job(form="f"))
    before = desk.fields()
    found = desk.run(desk.scripts.attach(JOB, f"{OTHER_API}#9"))
    assert found is not None
    assert (found.state, found.form, found.spec) == (State.DONE, "f", b"")
    assert 0 < found.forgotten_ms <= 300_000
    assert desk.fields() == before


def test_a_job_that_nobody_knows_cannot_be_watched(desk: Desk) -> None:
    assert desk.run(desk.scripts.attach("nobody/0", f"{API}#1")) is None


def test_a_look_says_which_attempt_wrote_each_token(desk: Desk) -> None:
    desk.to(State.DECODE)
    count = len(desk.view().ids)
    assert desk.emit(count, (5, 6)).code == "ok"
    desk.preempt()
    assert desk.requeue(count + 1, f"{API}#1").code == "ok"
    assert desk.view().epochs == (1,) * (count + 1)


def heard(desk: Desk, api: str) -> list[str]:
    """The kinds of what a viewer was told, in order."""
    entries = desk.look().streams.get(f"live:{api}", [])
    return [event[0] for _, fields in entries for event in orjson.loads(fields["e"])]


def test_a_quiet_viewer_hears_of_preempts_and_ends_and_of_nothing_else(desk: Desk) -> None:
    quiet = f"~{OTHER_API}"
    for api in (API, quiet):
        desk.run(desk.scripts.attend(api, 30, begin=True))
    claim = desk.to(State.DECODE, new_job(attachment=f"{API}#1 {quiet}#2"))
    count = len(desk.view().ids)
    assert desk.preempt(claim.epoch) == "ok"
    assert desk.requeue(-1, f"{quiet}#2").code == "ok"
    assert desk.cancel() == "ended"
    assert set(heard(desk, API)) == {"t", "p", "r", "e"}
    assert heard(desk, quiet) == ["p", "e"]
    assert len(desk.view().ids) == count


def test_a_quiet_viewer_is_missed_like_any_other(desk: Desk) -> None:
    desk.to(State.DECODE, new_job(attachment=f"~{OTHER_API}#2"))
    desk.last_heard(f"~{OTHER_API}", 2 * GRACE_MS)
    assert sweep(desk) == Reaped(abandoned=(JOB,))
