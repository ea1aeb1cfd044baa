"""The scheduling policy: its rules one by one, and in simulated fleets what they promise together."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prelay_queue.job import Priority
from prelay_worker.policy import (
    CLASSES,
    Begin,
    Evict,
    Head,
    Holder,
    Opening,
    Room,
    claim_order,
    decide,
    opening,
    urgency_after,
)
from tests.unit.worker.simfleet import BLOCK, MOST, PATIENCE, Fleet, Worker, blocks

URGENT, NORMAL, BATCH = range(3)
FULL = Room(blocks=0, slots=0, total=10)


def batch(key: str = "b", arrival: int = 0, gives: int = 2, **changes: Any) -> Holder:
    return replace(Holder(key, BATCH, arrival, gives, slot=True), **changes)


def head(key: str = "h", urgency: int = URGENT, arrival: int = 0, needs: int = 1, **changes: bool) -> Head:
    return Head(key, urgency, arrival, needs, **changes)


# Who begins.


def test_the_most_urgent_begins_and_within_a_class_the_first_submitted() -> None:
    heads = [head("late", NORMAL, 9), head("early", NORMAL, 1), head("batch", BATCH, 0)]
    assert decide(heads, [], Room(9, 9, 9)) == Begin("early")
    assert decide([*heads, head("now", URGENT, 99)], [], Room(9, 9, 9)) == Begin("now")


def test_a_reservation_goes_before_its_class() -> None:
    heads = [head("early", BATCH, 1), head("kept", BATCH, 5, reserved=True), head("normal", NORMAL, 9)]
    assert decide(heads, [], Room(9, 9, 9)) == Begin("normal")
    assert decide(heads[:2], [], Room(9, 9, 9)) == Begin("kept")


def test_nobody_begins_before_the_first_in_line_even_if_there_were_room_for_them() -> None:
    heads = [head("large", NORMAL, needs=5), head("small", BATCH, needs=1)]
    assert decide(heads, [batch(urgency=NORMAL)], Room(4, 4, 9)) is None


def test_nobody_begins_while_somebody_runs_alone_and_a_job_for_itself_waits_for_all() -> None:
    assert decide([head()], [], Room(9, 9, 9, closed=True)) is None
    alone = head(alone=True)
    assert decide([alone], [batch()], Room(9, 9, 9)) is None
    assert decide([alone], [batch(slot=False)], Room(9, 9, 9)) == Begin("h")
    assert opening([alone], [], Room(9, 9, 9)) == Opening()


def test_reservations_of_lower_classes_hold_half_of_the_pool_together_and_a_single_one_what_it_needs() -> None:
    room = Room(blocks=8, slots=8, total=10)
    kept = batch(gives=2, reserved=2, fixed=True)
    assert decide([head(urgency=BATCH, needs=4, reserved=True)], [kept], room) is None
    assert decide([head(urgency=BATCH, needs=3, reserved=True)], [kept], room) == Begin("h")
    assert decide([head(urgency=BATCH, needs=8, reserved=True)], [batch()], room) == Begin("h")
    assert decide([head(urgency=URGENT, needs=8, reserved=True)], [kept], room) == Begin("h")
    assert decide([head(urgency=BATCH, needs=8)], [kept], room) == Begin("h")


def test_a_batch_head_leaves_the_headroom_to_others_unless_nothing_is_held() -> None:
    room = Room(blocks=5, slots=3, total=40, spared_blocks=2, spared_slots=1)
    held = [batch()]
    assert decide([head(urgency=BATCH, needs=3)], held, room) == Begin("h")
    assert decide([head(urgency=BATCH, needs=4)], held, room) is None
    assert decide([head(urgency=BATCH, needs=4)], [], room) == Begin("h")
    assert decide([head(urgency=BATCH, needs=3)], held, replace(room, slots=1)) is None
    for urgency in (URGENT, NORMAL):
        assert decide([head(urgency=urgency, needs=5)], held, replace(room, slots=1)) == Begin("h")
    assert opening([head(urgency=BATCH, needs=4)], held, room).room == BATCH, "who is more urgent is claimed"


# Who is evicted.


@pytest.mark.parametrize("urgency", [URGENT, NORMAL])
def test_the_latest_batch_job_goes_for_a_more_urgent_one_that_lacks_a_slot(urgency: int) -> None:
    holders = [batch("early", 1), batch("late", 2), batch("normal", 3, urgency=NORMAL)]
    assert decide([head(urgency=urgency)], holders, Room(9, 0, 9)) == Evict(("late",))


def test_no_job_goes_for_an_equal_nor_a_normal_one_for_anybody() -> None:
    assert decide([head(urgency=BATCH)], [batch()], FULL) is None
    assert decide([head(urgency=URGENT)], [batch(urgency=NORMAL)], FULL) is None


@pytest.mark.parametrize("staying", [batch(fixed=True), batch(leaving=True)])
def test_one_that_may_not_go_now_or_never_stays(staying: Holder) -> None:
    assert decide([head(needs=3)], [staying], FULL) is None
    assert opening([], [staying], FULL) == Opening(CLASSES, 0)


def test_no_more_go_than_it_takes_and_the_earliest_are_spared() -> None:
    holders = [batch("early large", 1, 8), batch("late small", 2, 1), batch("latest", 3, 2)]
    assert decide([head(needs=2)], holders, FULL) == Evict(("latest",))
    assert decide([head(needs=3)], holders, FULL) == Evict(("latest", "late small"))
    assert decide([head(needs=8)], holders, FULL) == Evict(("early large",))


def test_nobody_goes_in_vain() -> None:
    assert decide([head(needs=9)], [batch(gives=8)], FULL) is None
    held = batch(gives=9, slot=False)
    assert decide([head(needs=1)], [held], FULL) is None, "it gives blocks, but no slot"
    assert decide([head(needs=1)], [held], Room(0, 1, 10)) == Evict(("b",))


def test_what_is_leaving_is_waited_for_and_nobody_else_goes() -> None:
    holders = [batch("leaving", gives=2, leaving=True), batch("other")]
    assert decide([head(needs=2)], holders, Room(0, 1, 10)) is None
    assert decide([head(needs=3)], holders, Room(0, 1, 10)) == Evict(("other",))


# What is claimed.


def test_while_a_head_waits_only_classes_above_it_are_claimed() -> None:
    assert opening([], [], FULL) == Opening(room=CLASSES, full=0, unserved=True)
    assert opening([head(urgency=BATCH)], [], FULL) == Opening(room=2, full=0)
    assert opening([head(urgency=BATCH), head(urgency=NORMAL)], [batch()], FULL) == Opening(room=1, full=1)
    assert opening([head(urgency=URGENT)], [batch()], FULL) == Opening(0, 0)


def test_without_room_the_classes_above_batch_are_claimed_while_a_batch_job_may_go() -> None:
    assert opening([], [batch()], FULL).full == 2
    assert opening([], [batch(urgency=NORMAL)], FULL).full == 0


def test_patience_lifts_a_head_class_by_class() -> None:
    assert [urgency_after(Priority.BATCH, waited, 10) for waited in (0, 9.9, 10, 19.9, 20, 1e9)] == [2, 2, 1, 1, 0, 0]
    assert urgency_after(Priority.INTERACTIVE, 1e9, 10) == 0


ALL = {URGENT, NORMAL, BATCH}


def test_every_class_begins_some_of_ten_claims_in_a_row() -> None:
    orders = [claim_order(turn, CLASSES, unserved=False, queued=ALL) for turn in range(20)]
    assert all(sorted(order) == [URGENT, NORMAL, BATCH] for order in orders)
    assert [[order[0] for order in orders].count(urgency) for urgency in range(CLASSES)] == [14, 4, 2]


def firsts(classes: int, unserved: bool, queued: set[int]) -> list[int]:
    """How many of ten claims in a row look at each class first."""
    orders = [claim_order(turn, classes, unserved, queued) for turn in range(10)]
    assert all(len(set(order)) == len(order) and set(order) <= queued for order in orders)
    return [[order[:1] for order in orders].count([urgency]) for urgency in range(CLASSES)]


def test_the_classes_that_may_be_claimed_keep_their_shares_while_the_lower_ones_may_not() -> None:
    assert firsts(2, False, ALL) == [8, 2, 0]
    assert firsts(1, False, ALL) == [10, 0, 0]
    assert firsts(2, False, {BATCH}) == [0, 0, 0]


def test_a_batch_job_that_would_always_be_passed_has_its_turn_where_none_is_served() -> None:
    assert firsts(2, True, ALL) == [7, 2, 1]
    assert firsts(1, True, {URGENT, BATCH}) == [9, 0, 1]
    assert firsts(2, True, {BATCH}) == [0, 0, 0], "nobody passes it"


def test_a_batch_job_is_served_where_one_runs_or_waits() -> None:
    assert opening([], [batch(urgency=NORMAL)], FULL).unserved
    assert not opening([], [batch()], FULL).unserved
    assert not opening([head(urgency=BATCH)], [], FULL).unserved
    assert opening([head(urgency=NORMAL)], [], FULL).unserved


# Fleets.

ROLES = [("unified",), ("unified", "unified"), ("prefill", "decode"), ("prefill", "prefill", "decode", "decode")]
#: The smallest pool; no job is larger.
LEAST = 6


@st.composite
def fleets(draw: st.DrawFn, largest: int = 16, slots: int = 5) -> Fleet:
    """Of workers with pools of up to so many blocks and up to so many slots."""
    fleet = Fleet(Random(draw(st.integers(0, 2**32))))
    for role in draw(st.sampled_from(ROLES)):
        fleet.workers.append(Worker(fleet, role, draw(st.integers(LEAST, largest)), draw(st.integers(1, slots))))
    return fleet


#: With pools and slots so few that a sixteenth of them is none, and with more.
ANY_FLEET = fleets() | fleets(largest=64, slots=32)
SIZES = st.tuples(st.sampled_from(Priority), st.integers(1, 12), st.integers(1, 12), st.integers(1, 12))
ARRIVALS = st.dictionaries(st.integers(0, 60), st.lists(SIZES, min_size=1, max_size=6), max_size=12)
#: A simulated fleet is many draws and many turns.
THOROUGH = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))


def run(fleet: Fleet, arrivals: dict[int, list[tuple[Priority, int, int, int]]], limit: int) -> None:
    """Until every job has ended; each fits the smallest pool."""
    last = max(arrivals, default=0)
    while fleet.now < last or any(job.place != "done" for job in fleet.jobs):
        for priority, prompt, most, answer in arrivals.get(fleet.now, ()):
            assert blocks(prompt + most) <= LEAST
            fleet.submit(priority, prompt, most, answer)
        fleet.tick()
        unfinished = [job for job in fleet.jobs if job.place != "done"]
        assert fleet.now < limit, f"not done: {unfinished}\n{fleet.workers}"


@given(fleet=ANY_FLEET, arrivals=ARRIVALS)
@THOROUGH
def test_every_job_of_any_fleet_finishes_and_none_is_evicted_more_often_than_the_bound(
    fleet: Fleet, arrivals: dict[int, list[tuple[Priority, int, int, int]]]
) -> None:
    jobs = sum(map(len, arrivals.values()))
    # Alone, a job is done in some 20 ticks an attempt; here they may all have to go one after the other.
    run(fleet, arrivals, limit=100 + 3 * PATIENCE + jobs * (MOST + 1) * 20)
    assert all(job.ids == job.answer for job in fleet.jobs)
    for worker in fleet.workers:
        assert (worker.attempts, worker.heads, worker.free) == ({}, {}, worker.size)


@given(fleet=ANY_FLEET, large=st.integers(1, 12), seed=st.integers(0, 2**32))
@THOROUGH
def test_a_batch_job_finishes_though_urgent_ones_never_stop_coming(fleet: Fleet, large: int, seed: int) -> None:
    chance = Random(seed)
    slow = fleet.submit(Priority.BATCH, large, LEAST * BLOCK - large, 99)
    while slow.place != "done":
        for _ in range(max(0, 12 - fleet.waiting("prefill"))):  # always some that wait
            fleet.submit(Priority.INTERACTIVE, chance.randint(1, 8), 8, chance.randint(1, 8))
        fleet.tick()
        assert fleet.now < (MOST + 1) * (2 * PATIENCE + 150) * 2, f"starved: {slow}\n{fleet.workers}"


@given(slots=st.integers(1, 4), patient=st.integers(1, 6), seed=st.integers(0, 2**32))
@THOROUGH
def test_an_urgent_job_begins_at_once_though_batch_jobs_fill_every_slot(slots: int, patient: int, seed: int) -> None:
    fleet = Fleet(Random(seed))
    fleet.workers.append(Worker(fleet, "unified", 60, slots))
    for _ in range(4 * slots):
        fleet.submit(Priority.BATCH, 4, 60, 60)
    for _ in range(3 + patient):
        fleet.tick()
    urgent = fleet.submit(Priority.INTERACTIVE, 4, 20, 20)
    begun = fleet.now
    while not urgent.ids:
        fleet.tick()
    assert fleet.now - begun <= 2


@given(fleet=ANY_FLEET, count=st.integers(2, 8))
@THOROUGH
def test_reservations_never_wait_for_each_other(fleet: Fleet, count: int) -> None:
    """All have been evicted as often as they may be, and each asks for more than half of a pool."""
    for _ in range(count):
        fleet.submit(Priority.BATCH, 12, 12, 12).preempts = MOST
    run(fleet, {}, limit=100 + 3 * PATIENCE + count * 60)
    assert {job.preempts for job in fleet.jobs} == {MOST}
