"""How rows are laid in tiles for `attention.attend`: planned on the host, from numbers the host has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Shape:
    """What one program of `attend` computes at a time, and with what.

    A function of the model alone, never of a batch: with another shape a row would be summed in another order.
    """

    block_m: int  # rows · query heads of one key head
    block_n: int  # keys
    warps: int
    stages: int

    @staticmethod
    def of(head_dim: int, dtype: torch.dtype, group: int, exact: bool = False) -> Shape:
        """The shape for heads of `head_dim` numbers of `dtype`, `group` query heads a key head.

        `exact` is the one that single rows and prompts alike are computed with; the other is for prompts.
        """
        wide, least = head_dim > 128, _power_of_two(group)
        if dtype.itemsize > 2:
            # No tensor core multiplies these without rounding them first: single FMAs, operands in registers.
            return Shape(max(32, least), 32 if head_dim <= 64 else 16, 8 if wide else 4, 2)
        block_m = max(64 if exact or wide else 128, least)
        return Shape(block_m, 32 if wide else 64, 8 if block_m > 64 or wide else 4, 3)

    def rows(self, group: int) -> int:
        """Rows of a tile."""
        return self.block_m // group


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of up to `rows` rows of one sequence each.

    `table` int32 [tile, 4]: which row of the block tables (-1: the rows are padding, and come out as zeros), the
    first row of the batch, how many rows, the position of the first.
    """

    table: torch.Tensor
    rows: int

    def __len__(self) -> int:
        return self.table.shape[0]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Tiles:
        return replace(self, table=self.table.to(device, non_blocking=non_blocking))


def tiles(spans: Sequence[tuple[int, int]], rows_per_tile: int, rows: int | None = None) -> Tiles:
    """Tiles in CPU memory for sequences' (first position, length), in the order of their rows and block tables.

    `rows` is what the batch has with its padding, by default none. ValueError where it has fewer than `spans`.
    """
    found, row = [], 0
    for sequence, (start, length) in enumerate(spans):
        for done in range(0, length, rows_per_tile):
            found.append((sequence, row + done, min(rows_per_tile, length - done), start + done))
        row += length
    if rows is not None and rows < row:
        raise ValueError(f"the spans have {row} rows, the batch {rows}")
    # Those with the most keys first: what is started last should not be what takes longest.
    found.sort(key=lambda tile: -(tile[3] + tile[2]))
    for first in range(row, rows or 0, rows_per_tile):
        found.append((-1, first, min(rows_per_tile, (rows or 0) - first), 0))
    return Tiles(torch.from_numpy(np.array(found, dtype=np.int32).reshape(-1, 4)), rows_per_tile)


def single_rows(positions: Sequence[int], rows_per_tile: int) -> Tiles:
    """A tile for every row, as many and in the order of `positions`: what a CUDA graph of single rows is fed with.

    Row i is of sequence i; -1 as its position says that it is padding.
    """
    table = np.zeros((len(positions), 4), dtype=np.int32)
    table[:, 3] = positions
    table[:, 1] = np.arange(len(positions))
    table[:, 0] = np.where(table[:, 3] < 0, -1, table[:, 1])
    table[:, 2] = 1
    return Tiles(torch.from_numpy(table), rows_per_tile)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
