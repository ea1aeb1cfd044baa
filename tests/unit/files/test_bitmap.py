"""A set of numbers, against Python's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prelay_files.bitmap import Bitmap


@given(st.lists(st.integers(0, 500)))
def test_it_is_the_set_of_what_was_added(numbers: list[int]) -> None:
    bitmap = Bitmap()
    for number in numbers:
        bitmap.add(number)
    again = Bitmap(bitmap.encode())
    for each in (bitmap, again):
        assert len(each) == len(set(numbers))
        assert {number for number in range(600) if number in each} == set(numbers)


def test_a_million_lines_take_125_kilobytes() -> None:
    bitmap = Bitmap()
    bitmap.add(999_999)
    assert len(bitmap.encode()) == 125_000


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 0, not -1"):
        Bitmap().add(-1)
