"""How much a worker claims ahead of its model loop."""

from __future__ import annotations

import threading

import pytest

from prelay_worker import admission as module
from prelay_worker.admission import Admission

BLOCK = 4


def test_nothing_is_claimed_before_the_model_loop_has_spoken() -> None:
    assert not Admission(BLOCK).wait_open(0)


@pytest.mark.parametrize(("blocks", "slots", "closed", "is_open"), [
    (1, 1, False, True), (0, 1, False, False), (1, 0, False, False), (9, 9, True, False),
])  # fmt: skip
def test_it_is_open_while_blocks_and_slots_are_free(blocks: int, slots: int, closed: bool, is_open: bool) -> None:
    admission = Admission(BLOCK)
    admission.publish(blocks, slots, closed)
    assert admission.wait_open(0) is is_open


def test_what_is_claimed_but_not_admitted_yet_counts() -> None:
    admission = Admission(BLOCK)
    admission.publish(blocks=3, slots=9, closed=False)
    admission.charge("a", tokens=7, alone=False)  # 8 with the next one: 2 blocks
    assert admission.wait_open(0)
    admission.charge("b", tokens=3, alone=False)
    assert not admission.wait_open(0)
    admission.publish(blocks=3, slots=9, closed=False)  # the loop has not seen them yet
    assert not admission.wait_open(0)
    admission.settle("a")
    admission.publish(blocks=2, slots=9, closed=False)
    assert admission.wait_open(0)


def test_slots_are_not_claimed_twice() -> None:
    admission = Admission(BLOCK)
    admission.publish(blocks=99, slots=2, closed=False)
    admission.charge("a", 1, alone=False)
    assert admission.wait_open(0)
    admission.charge("b", 1, alone=False)
    assert not admission.wait_open(0)


def test_a_claim_that_does_not_fit_closes_until_the_loop_has_it() -> None:
    admission = Admission(BLOCK)
    admission.publish(blocks=2, slots=9, closed=False)
    admission.charge("large", tokens=100, alone=False)
    assert not admission.wait_open(0)
    admission.settle("large")
    admission.publish(blocks=2, slots=9, closed=True)  # it waits as the head now
    assert not admission.wait_open(0)


def test_a_claim_that_must_run_alone_closes_at_once() -> None:
    admission = Admission(BLOCK)
    admission.publish(blocks=99, slots=9, closed=False)
    admission.charge("a", 1, alone=True)
    assert not admission.wait_open(0)


def test_a_loop_that_is_long_in_one_step_closes_and_opens_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    admission = Admission(BLOCK)
    admission.publish(9, 9, closed=False)
    now += module.STEP_S + 0.1
    assert not admission.wait_open(0)
    admission.publish(9, 9, closed=False)
    assert admission.wait_open(0)


def test_whoever_waits_is_woken_by_the_loop() -> None:
    admission = Admission(BLOCK)
    opened: list[bool] = []
    waiter = threading.Thread(target=lambda: opened.append(admission.wait_open(10)))
    waiter.start()
    admission.publish(1, 1, closed=False)
    waiter.join(10)
    assert opened == [True]
    admission.publish(0, 0, closed=False)
    assert not admission.wait_open(0.01)
