"""How much a worker claims ahead of its model loop."""

from __future__ import annotations

import threading
import time

import pytest

from prelay_worker import admission as module
from prelay_worker.admission import Admission
from prelay_worker.policy import Opening

BLOCK = 4
OPEN, SHUT = Opening(room=3), Opening()


def test_nothing_is_claimed_before_the_model_loop_has_spoken() -> None:
    assert not Admission(BLOCK).wait_open(0)


@pytest.mark.parametrize(("blocks", "slots", "opening", "classes"), [
    (1, 1, OPEN, 3), (0, 1, OPEN, 0), (1, 0, OPEN, 0), (9, 9, SHUT, 0),
    (1, 1, Opening(3, 2), 3), (0, 1, Opening(3, 2), 2), (1, 0, Opening(3, 2), 2), (1, 1, Opening(1, 2), 1),
])  # fmt: skip
def test_it_is_open_while_blocks_and_slots_are_free_or_can_be_freed(
    blocks: int, slots: int, opening: Opening, classes: int
) -> None:
    admission = Admission(BLOCK)
    admission.publish(blocks, slots, opening)
    assert admission.wait_open(0) == classes


def test_claims_of_batch_jobs_end_where_the_headroom_begins_and_others_go_on() -> None:
    admission = Admission(BLOCK)
    admission.publish(8, 8, OPEN, spared_blocks=4, spared_slots=2)
    assert admission.room_for([7] * 9) == 1, "two blocks each, and half of four are free for it"
    for name, classes in (("a", 3), ("b", 2), ("c", 2)):
        admission.charge(name, 7, alone=False)
        assert (admission.wait_open(0), admission.has_room) == (classes, True)
    admission.charge("d", 7, alone=False)
    assert (admission.wait_open(0), admission.has_room) == (0, False)
    admission.publish(90, 3, OPEN, spared_blocks=4, spared_slots=2)
    assert admission.wait_open(0) == 0, "four are claimed, three have a slot"
    for name in "abcd":
        admission.settle(name)
    admission.publish(90, 2, OPEN, spared_blocks=4, spared_slots=2)
    assert admission.wait_open(0) == 2


def test_a_batch_job_that_would_wait_is_taken_once_and_only_where_others_have_room() -> None:
    admission = Admission(BLOCK)
    unserved = Opening(3, unserved=True)

    def published(blocks: int, opening: Opening) -> bool:
        admission.publish(blocks, 9, opening)
        return admission.unserved

    assert [published(0, unserved), published(1, OPEN), published(9, unserved)] == [False, False, True]
    admission.charge("a", 7, alone=False)  # it may be the one
    assert [admission.unserved, published(9, unserved)] == [False, True]


def test_where_there_is_no_room_one_job_is_claimed_at_a_time() -> None:
    admission = Admission(BLOCK)
    admission.publish(0, 0, Opening(3, 2))
    admission.charge("a", 7, alone=False)
    admission.publish(0, 0, Opening(3, 2))  # the loop has not seen it
    assert admission.wait_open(0) == 0
    admission.settle("a")
    admission.publish(0, 0, Opening(3, 1))
    assert admission.wait_open(0) == 1


def test_whoever_waits_for_more_classes_is_not_woken_by_fewer() -> None:
    admission = Admission(BLOCK)
    admission.publish(0, 0, Opening(3, 2))
    woken = threading.Event()

    def wait() -> None:
        admission.wait_wider(2, 10)
        woken.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    admission.publish(0, 0, Opening(3, 1))
    admission.publish(0, 0, Opening(3, 2))
    assert not woken.wait(0.05)
    admission.publish(9, 1, Opening(3, 2))
    assert woken.wait(10)
    waiter.join()


def test_what_is_claimed_but_not_admitted_yet_counts() -> None:
    admission = Admission(BLOCK)
    admission.publish(3, 9, OPEN)
    admission.charge("a", tokens=7, alone=False)  # 8 with the next one: 2 blocks
    assert admission.wait_open(0)
    admission.charge("b", tokens=3, alone=False)
    assert not admission.wait_open(0)
    admission.publish(3, 9, OPEN)  # the loop has not seen them yet
    assert not admission.wait_open(0)
    admission.settle("a")
    admission.publish(2, 9, OPEN)
    assert admission.wait_open(0)


def test_what_the_loop_has_counts_until_it_says_what_is_left() -> None:
    admission = Admission(BLOCK)
    admission.publish(99, 1, OPEN)
    admission.charge("a", 1, alone=False)
    admission.settle("a")
    assert not admission.wait_open(0), "the one slot is taken, and that is not published yet"
    admission.publish(98, 1, OPEN)
    assert admission.wait_open(0)


def test_slots_are_not_claimed_twice() -> None:
    admission = Admission(BLOCK)
    admission.publish(99, 2, OPEN)
    admission.charge("a", 1, alone=False)
    assert admission.wait_open(0)
    admission.charge("b", 1, alone=False)
    assert not admission.wait_open(0)


def test_a_claim_that_does_not_fit_closes_until_the_loop_has_it() -> None:
    admission = Admission(BLOCK)
    admission.publish(2, 9, OPEN)
    admission.charge("large", tokens=100, alone=False)
    assert not admission.wait_open(0)
    admission.settle("large")
    admission.publish(2, 9, SHUT)  # it waits as the head now
    assert not admission.wait_open(0)


def test_a_claim_that_must_run_alone_closes_at_once() -> None:
    admission = Admission(BLOCK)
    admission.publish(99, 9, OPEN)
    admission.charge("a", 1, alone=True)
    assert not admission.wait_open(0)


def test_a_loop_that_is_long_in_one_step_closes_and_opens_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    admission = Admission(BLOCK)
    admission.publish(9, 9, OPEN)
    now += module.STEP_S + 0.1
    assert not admission.wait_open(0)
    admission.publish(9, 9, OPEN)
    assert admission.wait_open(0)


def test_whoever_waits_is_woken_by_the_loop() -> None:
    admission = Admission(BLOCK)
    opened: list[int] = []
    waiter = threading.Thread(target=lambda: opened.append(admission.wait_open(10)))
    waiter.start()
    admission.publish(1, 1, OPEN)
    waiter.join(10)
    assert opened == [3]
    admission.publish(0, 0, OPEN)
    assert not admission.wait_open(0.01)


def test_of_what_is_free_half_may_be_claimed_at_a_time() -> None:
    admission = Admission(BLOCK)
    admission.publish(20, 8, OPEN)
    assert admission.room_for([3] * 9) == 4, "slots"
    assert admission.room_for([7] * 9) == 4, "2 blocks each"
    assert admission.room_for([7, 27, 7]) == 2, "in order: 2 and 7 blocks, and none is left for the third"
    admission.charge("a", 27, alone=False)
    assert admission.room_for([7] * 9) == 3, "7 blocks are promised"
    admission.charge("b", 99, alone=False)
    assert admission.room_for([3]) == 0
