from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prelay_engine.config import POSITION_BLOCK
from prelay_engine.masks import Masks, key_range

WINDOWS = st.one_of(st.none(), st.integers(1, 300))


@given(position=st.integers(0, 5000), window=WINDOWS)
def test_a_range_holds_all_that_a_row_attends_to_and_few_keys_more(position: int, window: int | None) -> None:
    first, stop = key_range(position, window)
    oldest = 0 if window is None else max(0, position - window + 1)
    assert first <= oldest
    assert position < stop <= position + POSITION_BLOCK
    # Never a whole split of the kernel (512 keys) without a single visible key: its softmax would be 0/0.
    assert oldest - first < 2 * POSITION_BLOCK


@given(position=st.integers(0, 5000), window=WINDOWS)
def test_rows_of_one_block_share_their_range(position: int, window: int | None) -> None:
    assert key_range(position, window) == key_range(position // POSITION_BLOCK * POSITION_BLOCK, window)


@given(position=st.integers(0, 3000), window=WINDOWS)
def test_a_mask_shows_exactly_the_window(position: int, window: int | None) -> None:
    first, stop = key_range(position, window)
    mask = Masks(window, torch.float32).row(position).flatten()
    keys = torch.arange(first, stop)
    visible = keys <= position
    if window is not None:
        visible &= keys > position - window
    assert torch.equal(mask == 0, visible)
    assert bool((mask[~visible] == float("-inf")).all())


@pytest.mark.parametrize("group", [1, 3, 4])
def test_the_mask_of_many_rows_repeats_each_rows_own_for_its_group_and_is_filled_up_to_four(group: int) -> None:
    masks = Masks(70, torch.bfloat16)
    many = masks.rows(130, 5, group)[0, 0]
    assert len(many) % 4 == 0
    assert 0 <= len(many) - 5 * group < 4
    for row in range(len(many)):
        own = masks.row(130 + min(row // group, 4))
        assert torch.equal(many[row], own.flatten())
