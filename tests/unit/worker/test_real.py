"""The copy of a hand-over passes its failpoints where their names say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from prelay_engine.blocks import BlockPool, BlockState
from prelay_engine.contiguous import ContiguousKv
from prelay_engine.geometry import Geometry
from prelay_kv.importer import Importer
from prelay_queue import failpoints
from prelay_queue.errors import QueueUnavailable
from prelay_worker.transport import HostImport

GEOMETRY = Geometry(layers=1, kv_heads=1, head_dim=2, dtype=torch.float32)
SIZE = 4
SOURCE = torch.ones(3, *GEOMETRY.block_shape(SIZE))


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


def copied(tokens: int, fault: str) -> list[bool]:
    """Copy three blocks with `fault` armed, which must strike; of each position whether it has arrived."""
    kv = ContiguousKv(GEOMETRY, BlockPool(8), SIZE)
    kv.open("a", tokens, tokens, BlockState.COPYING)
    failpoints.arm(fault)
    blocks = tuple(range(-(-tokens // SIZE)))
    with pytest.raises(QueueUnavailable):
        HostImport(Importer("layout", None, "here"), kv, "here")._copy("a", SOURCE, blocks, tokens)
    keys, _ = kv.cursor("a", 0, 1, 0, tokens).read(0)
    return [bool(row.all()) for row in keys[0, 0]]


def test_the_middle_of_a_copy_is_after_the_first_block_and_before_the_second() -> None:
    assert copied(3 * SIZE, "copy.middle=cut") == [True] * SIZE + [False] * 2 * SIZE


def test_before_and_after_have_nothing_and_all() -> None:
    assert copied(3 * SIZE, "copy.before=cut") == [False] * 3 * SIZE
    assert copied(3 * SIZE, "copy.after=cut") == [True] * 3 * SIZE
