"""What one step's kernels are told, built on the host: ids, positions, slots, block tables, tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..attention import Span
from .kernels.tiles import Tiles, tiles


@dataclass(frozen=True, slots=True)
class Inputs:
    """One step's rows. The first `singles` are decoded by themselves; the others are in tiles.

    ids, positions, slots int64 [row]; tables int32 [span, block]; lengths int32 [singles]: keys of a row, its own
    among them; tiles by how many rows one has: one for each size that the model's layers need.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    tiles: dict[int, Tiles]

    @property
    def singles(self) -> int:
        return self.lengths.shape[0]

    def to(self, device: torch.device) -> Inputs:
        """On `device`, in copies that are enqueued and not waited for."""
        if device.type == "cpu":
            return self

        def moved(part: torch.Tensor) -> torch.Tensor:
            return part.pin_memory().to(device, non_blocking=True)

        tiles = {rows: Tiles(moved(each.table), rows) for rows, each in self.tiles.items()}
        tables, lengths = moved(self.tables), moved(self.lengths)
        return Inputs(moved(self.ids), moved(self.positions), moved(self.slots), tables, lengths, tiles)


def inputs(
    spans: Sequence[Span],
    ids: Sequence[int],
    blocks: Sequence[Sequence[int]],
    block_size: int,
    tile_rows: Sequence[int],
    *,
    split: bool,
) -> Inputs:
    """Of `spans`, those of one row first, whose rows have `ids` and which hold `blocks`.

    `split`: single rows are decoded by themselves, so no tile is made of them.
    """
    singles = sum(span.length == 1 for span in spans) if split else 0
    starts = np.array([span.start for span in spans], dtype=np.int64)
    lengths = np.array([span.length for span in spans], dtype=np.int64)
    tables = table_of(blocks)
    owner = np.repeat(np.arange(len(spans)), lengths)
    first_rows = np.cumsum(lengths) - lengths
    positions = starts[owner] + np.arange(len(owner)) - first_rows[owner]
    slots = tables[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size
    return Inputs(
        torch.tensor(ids, dtype=torch.int64),
        torch.from_numpy(positions),
        torch.from_numpy(slots),
        torch.from_numpy(tables),
        torch.from_numpy((starts[:singles] + 1).astype(np.int32)),
        {rows: _tiles(spans, singles, rows) for rows in dict.fromkeys(tile_rows)} if singles < len(spans) else {},
    )


def table_of(blocks: Sequence[Sequence[int]]) -> npt.NDArray[np.int32]:
    """int32 [sequence, block], 0 where a sequence has fewer than the longest."""
    table = np.zeros((len(blocks), max(map(len, blocks))), dtype=np.int32)
    for row, own in zip(table, blocks, strict=True):
        row[: len(own)] = own
    return table


def _tiles(spans: Sequence[Span], singles: int, rows: int) -> Tiles:
    """Of all spans behind the first `singles`, which have one row each."""
    made = tiles([(span.start, span.length) for span in spans[singles:]], rows)
    made.table[:, :2] += singles  # rows of the tables, and of the batch
    return made
