"""Rows are laid in tiles so that each is computed once, the longest first."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prelay_engine.gpu.kernels.tiles import Shape, Tiles, single_rows, tiles

SPANS = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 70)), max_size=6)


@given(SPANS, st.integers(1, 32), st.integers(0, 40))
def test_every_row_is_in_one_tile_with_its_own_position_and_sequence(
    spans: list[tuple[int, int]], rows_per_tile: int, padding: int
) -> None:
    own = [(sequence, start + i) for sequence, (start, length) in enumerate(spans) for i in range(length)]
    laid = tiles(spans, rows_per_tile, len(own) + padding)
    found: dict[int, tuple[int, int]] = {}
    for sequence, first, rows, position in laid.table.tolist():
        assert 1 <= rows <= rows_per_tile == laid.rows
        for i in range(rows):
            assert first + i not in found
            found[first + i] = (sequence, position + i) if sequence >= 0 else (-1, 0)
    assert [found[row] for row in range(len(own))] == own
    assert [found[row] for row in range(len(own), len(own) + padding)] == [(-1, 0)] * padding
    assert len(found) == len(own) + padding


def test_tiles_with_the_most_keys_come_first_and_padding_last() -> None:
    laid = tiles([(0, 5), (100, 3)], 2, rows=9)
    assert laid.table.tolist() == [
        [1, 7, 1, 102], [1, 5, 2, 100], [0, 4, 1, 4], [0, 2, 2, 2], [0, 0, 2, 0], [-1, 8, 1, 0],
    ]  # fmt: skip


def test_a_batch_with_fewer_rows_than_its_spans_is_refused() -> None:
    with pytest.raises(ValueError, match="the spans have 5 rows, the batch 4"):
        tiles([(0, 5)], 2, rows=4)


def test_no_rows_give_no_tiles() -> None:
    assert len(tiles([], 4)) == len(tiles([(7, 0)], 4)) == 0
    assert tiles([], 4).table.shape == (0, 4)


def test_single_rows_have_a_tile_each_in_their_order() -> None:
    laid = single_rows([7, -1, 0], 16)
    assert laid.table.dtype == torch.int32
    assert [row[:3] for row in laid.table.tolist()] == [[0, 0, 1], [-1, 1, 1], [2, 2, 1]]
    assert laid.table[[0, 2], 3].tolist() == [7, 0]


def test_tiles_are_moved_with_all_they_say() -> None:
    moved = tiles([(3, 5)], 4).to("meta")
    assert isinstance(moved, Tiles)
    assert (moved.table.device.type, moved.rows, len(moved)) == ("meta", 4, 2)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@given(head_dim=st.sampled_from([16, 64, 80, 96, 128, 192, 256]), group=st.integers(1, 64))
def test_a_shape_is_what_tensor_cores_multiply_and_has_room_for_a_row(
    dtype: torch.dtype, exact: bool, head_dim: int, group: int
) -> None:
    shape = Shape.of(head_dim, dtype, group, exact)
    for size in (shape.block_m, shape.block_n):
        assert size >= 16
        assert size.bit_count() == 1
    assert shape.rows(group) >= 1
    assert shape.rows(group) * group <= shape.block_m
