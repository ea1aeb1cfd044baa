"""Redis goes back to an older moment, as after a failover to a replica that was behind: who may still write?"""

from __future__ import annotations

from collections.abc import Callable

from prelay_queue.events import EndedEvent
from prelay_queue.scripts import Emitted
from prelay_queue.state import State
from tests.integration.queue_desk import API, D1, D2, DOMAIN, P1, P2, Desk, new_job


def test_the_owner_of_then_goes_on_and_the_later_one_is_fenced(desk: Desk) -> None:
    desk.to(State.DECODE)
    go_back = desk.backend.keep()
    desk.crash()
    assert desk.claim(P2).code == "ok"
    go_back()
    before = desk.look()
    assert desk.handoff(2, P2, seq=3) == "fenced"
    assert desk.look() == before
    assert desk.emit(3, (10,)) == Emitted("ok", 4)


def test_two_owners_of_one_epoch_are_told_apart(desk: Desk) -> None:
    """The reason why the fence is not the epoch alone."""
    desk.to(State.QUEUED)
    go_back = desk.backend.keep()
    assert desk.claim(P1).code == "ok"
    go_back()
    assert desk.claim(P2).code == "ok"
    before = desk.look()
    assert desk.handoff(1, P1) == "fenced"
    assert desk.renew(P1) == "lost"
    assert desk.look() == before
    assert desk.handoff(1, P2) == "ok"


def test_an_owner_whose_tokens_were_lost_hears_where_the_log_ends(desk: Desk) -> None:
    desk.to(State.DECODE)
    go_back = desk.backend.keep()
    desk.emit(3, (10, 11))
    go_back()
    assert desk.emit(5, (12,)) == Emitted("gap", 3)
    assert desk.finish(5, (12,)) == "gap"
    assert desk.emit(3, (10, 11, 12)) == Emitted("ok", 6)


def test_a_decode_worker_that_adopted_in_a_lost_time_is_fenced_until_it_claims(desk: Desk) -> None:
    desk.to(State.STAGED)
    go_back = desk.backend.keep()
    assert desk.claim(D1, f"decode:{DOMAIN}").code == "ok"
    assert desk.adopt() == "ok"
    go_back()
    assert desk.emit(1, (8,)).code == "fenced"
    assert desk.renew(P1, "export") == "hold"
    assert desk.claim(D2, f"decode:{DOMAIN}").code == "ok"
    assert desk.adopt(owner=D2) == "ok"
    assert desk.emit(1, (9,), owner=D2) == Emitted("ok", 2)
    assert desk.emit(2, (10,)).code == "fenced"


def test_a_job_whose_end_was_lost_ends_once_more(desk: Desk) -> None:
    desk.to(State.DECODE)
    desk.listen(API)
    go_back = desk.backend.keep()
    assert desk.finish(3, (10,)) == "ok"
    go_back()
    assert desk.finish(3, (10,)) == "ok"
    assert [event for event in desk.heard() if isinstance(event, EndedEvent)] == [EndedEvent("r/0", 1, 4, "stop")]
    assert [data for _, data in desk.log() if "f" in data] == [{"f": "stop", "e": ""}]


def test_a_job_that_vanished_is_rebuilt_above_every_attempt_that_anybody_saw(desk: Desk) -> None:
    go_back = desk.backend.keep()
    desk.to(State.DECODE)
    go_back()
    late = (desk.adopt, lambda: desk.emit(3, (10,)).code, lambda: desk.finish(3, (10,)), desk.preempt)
    writes: tuple[Callable[[], str], ...] = late
    for write in writes:
        assert write() == "gone"
    assert desk.submit(new_job(epoch=2, ids=(7, 8))) == ("new",)
    assert desk.submit(new_job(epoch=3, ids=(7, 8, 9))) == ("exists",)  # another viewer, which had seen more
    before = desk.look()
    assert desk.emit(2, (99,)).code == "fenced"
    assert desk.look() == before
    claim = desk.claim(P2).claim
    assert claim is not None
    assert (claim.epoch, claim.ids) == (2, (7, 8))
