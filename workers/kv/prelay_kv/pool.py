"""A worker's pool, wherever its blocks are."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from .layout import KvLayout
from .owned import OwnedFile
from .ref import KvRef
from .segment import Segment


class KvPool:
    """The blocks of one worker and their generation table. Only this process writes either.

    Raise a block's generation before its memory is written for another use, on a GPU before the writing is enqueued;
    whoever copied the block compares afterwards.
    """

    def __init__(self, file: OwnedFile, segment: Segment, layout: KvLayout, tensor: torch.Tensor) -> None:
        self._file = file
        self.path: Path = file.path
        self.segment = segment
        self.layout = layout
        #: `[block, layer, 2, kv_head, slot, head_dim]`, zero at first.
        self.tensor: torch.Tensor = tensor
        #: Generation of each block, 0 at first: an incarnation has its own file, so no count is carried over.
        self.generations: npt.NDArray[np.uint64] = file.generations()

    def __repr__(self) -> str:
        state = "closed" if self._file.closed else "open"
        return f"{type(self).__name__}({self.path.name}, {self.layout.num_blocks} blocks, {state})"

    def ref(self, blocks: Iterable[int], generations: Iterable[int], tokens: int) -> KvRef:
        """The reference to hand over for positions 0 … tokens-1 in `blocks`; ValueError when they contradict.

        On a GPU, what writes these blocks must have been synchronised before the reference leaves this process.
        """
        return KvRef(self.segment, tuple(map(int, blocks)), tuple(map(int, generations)), tokens, self.layout)

    def _drop_views(self) -> None:
        self.tensor = torch.empty(0)
        self.generations = np.empty(0, dtype=np.uint64)
