from __future__ import annotations

import mmap

import pytest
import torch

from prelay_engine.blockcopies import BlockCopies
from prelay_engine.geometry import Geometry

#: Two and a half pages a block, and a small part of one.
LARGE = Geometry(layers=2, kv_heads=5, head_dim=16 * mmap.PAGESIZE // 4096, dtype=torch.float32)
SMALL = Geometry(layers=1, kv_heads=1, head_dim=2, dtype=torch.float32)


@pytest.mark.parametrize("geometry", [LARGE, SMALL])
def test_what_is_written_stands_until_it_is_dropped_and_its_neighbours_stand_after(geometry: Geometry) -> None:
    copies = BlockCopies(geometry, 4, 8)
    for block in range(4):
        copies.write(block, torch.full(geometry.block_shape(8), block + 1.0))
    copies.drop([1, 2])
    assert copies.written == {0, 3}
    assert bool((copies.block(0) == 1).all())
    assert bool((copies.block(3) == 4).all())
    copies.write(2, torch.full(geometry.block_shape(8), 9.0))
    copies.drop([0, 1])
    assert bool((copies.block(2) == 9).all())
    assert copies.written == {2, 3}


def test_dropped_memory_goes_back_to_the_system() -> None:
    """Anonymous memory that was given back reads as zeros: all but the pages that two blocks share."""
    copies = BlockCopies(LARGE, 3, 8)
    for block in range(3):
        copies.write(block, torch.ones(LARGE.block_shape(8)))
    whole = LARGE.block_bytes(8) // mmap.PAGESIZE
    assert whole >= 2
    copies.drop([1])
    zeros = int((copies.block(1) == 0).sum()) * 4
    assert zeros >= (whole - 1) * mmap.PAGESIZE
    copies.drop([0, 2])
    assert not copies.written


def test_a_store_without_a_cache_maps_nothing() -> None:
    assert not BlockCopies(SMALL, 0, 8).written
    BlockCopies(SMALL, 0, 8).drop([0, 1])
