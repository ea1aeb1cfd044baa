"""How much of a batch is in the queue."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prelay_batch.window import LEAST_WAITING, Backlog, Window


def drive(window: Window, per_s: float, seconds: float, every_s: float = 0.05) -> None:
    """A fleet that begins so many jobs a second, which come at once again."""
    steps = int(seconds / every_s)
    for step in range(steps + 1):
        begun = int(per_s * step * every_s)
        window.see(Backlog(5, begun + 5), step * every_s)


def test_an_unknown_fleet_gets_a_few_jobs() -> None:
    assert Window(512).room(0, 0) == LEAST_WAITING


def test_what_may_wait_is_what_the_fleet_begins_in_a_second() -> None:
    window = Window(10_000)
    drive(window, 300, seconds=8)
    assert 290 <= window.may_wait <= 310
    assert window.room(outstanding=0, waiting=100) == window.may_wait - 100


def test_what_is_outstanding_has_a_limit_of_its_own() -> None:
    window = Window(512)
    drive(window, 5_000, seconds=8)
    assert window.room(outstanding=500, waiting=0) == 12
    assert window.room(outstanding=512, waiting=0) == 0


def test_a_fleet_that_begins_nothing_more_gets_nothing_more() -> None:
    window = Window(512)
    drive(window, 300, seconds=8)
    for step in range(1, 200):
        window.see(Backlog(300, 2_400 + 300), 8 + step * 0.05)
    assert window.room(outstanding=300, waiting=300) == 0
    assert window.may_wait == LEAST_WAITING


def test_a_redis_that_lost_its_streams_counts_for_nothing() -> None:
    window = Window(512)
    drive(window, 300, seconds=8)
    window.see(Backlog(0, 0), 8.1)
    assert 0 < window.may_wait <= 310


@given(
    seen=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.floats(0, 100)), max_size=20),
    outstanding=st.integers(0, 2_000),
    waiting=st.integers(0, 2_000),
)
def test_the_room_is_never_more_than_the_window_nor_less_than_none(
    seen: list[tuple[int, int, float]], outstanding: int, waiting: int
) -> None:
    window = Window(512)
    for each, added, at in seen:
        window.see(Backlog(each, added), at)
    room = window.room(outstanding, waiting)
    assert 0 <= room <= max(0, 512 - outstanding)
    assert window.may_wait >= LEAST_WAITING
