"""Lines that were read ahead."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prelay_batch.order import Lookahead, prefix_key
from tests.unit.batch.lines import line


def drained(ahead: Lookahead) -> list[int]:
    found = []
    while (each := ahead.next()) is not None:
        found.append(each.number)
    return found


def test_lines_that_share_a_prefix_come_one_after_the_other() -> None:
    ahead = Lookahead(100, 10_000)
    prompts = [(5, 6, 1), (300, 1), (5, 6, 2), (2,), (300, 2), (5, 6)]
    for number, ids in enumerate(prompts):
        ahead.add(line(number, ids))
    assert drained(ahead) == [3, 5, 0, 2, 1, 4]


def test_what_comes_while_a_group_is_handed_out_is_the_next_group() -> None:
    ahead = Lookahead(100, 10_000)
    for number, ids in enumerate([(3,), (1,)]):
        ahead.add(line(number, ids))
    first = ahead.next()
    ahead.add(line(2, (2,)))
    assert first is not None
    assert (first.number, drained(ahead)) == (1, [0, 2])


def test_a_line_that_is_put_back_is_the_next_one() -> None:
    ahead = Lookahead(100, 10_000)
    for number in range(3):
        ahead.add(line(number, (number,)))
    lines = [each for each in (ahead.next(), ahead.next()) if each is not None]
    ahead.put_back(lines)
    assert drained(ahead) == [0, 1, 2]


def test_there_is_room_up_to_a_number_of_lines_and_of_bytes_and_always_for_one() -> None:
    ahead, room = Lookahead(2, 100), []
    for number, size in enumerate((1_000, 10, 10)):
        ahead.add(line(number, size=size))
        room.append(ahead.has_room)
        if number == 0:
            ahead.next()
            room.append(ahead.has_room)
    assert room == [False, True, True, False]
    assert [each.number for each in ahead.clear()] == [1, 2]
    assert not ahead
    assert ahead.has_room


@given(st.lists(st.lists(st.integers(0, 2**20), min_size=1, max_size=5).map(tuple), max_size=20))
def test_every_line_comes_once_and_in_the_order_of_its_ids(prompts: list[tuple[int, ...]]) -> None:
    ahead = Lookahead(100, 10_000)
    for number, ids in enumerate(prompts):
        ahead.add(line(number, ids))
    order = drained(ahead)
    assert sorted(order) == list(range(len(prompts)))
    assert [prompts[number] for number in order] == sorted(prompts)
    assert len({prefix_key(line(0, ids)) for ids in prompts}) == len(set(prompts))
