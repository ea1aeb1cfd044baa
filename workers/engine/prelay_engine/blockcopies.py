"""Memory for blocks that are cached apart from the sequences that computed them."""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import torch

from .geometry import Geometry

#: Linux: do not reserve swap for the mapping; most of it is never touched.
LAZY = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)


class BlockCopies:
    """One place `[layer, 2, kv_head, slot, head_dim]` for each block of a pool, real memory only where it was written.

    So copies and sequences together take the memory of the pool: a block that goes to a sequence is dropped here.
    """

    def __init__(self, geometry: Geometry, blocks: int, block_size: int) -> None:
        """May raise OSError: the system refuses the mapping."""
        self._bytes = geometry.block_bytes(block_size)
        self._memory = mmap.mmap(-1, max(1, blocks * self._bytes), flags=LAZY)
        numbers = blocks * self._bytes // geometry.dtype.itemsize
        flat = torch.frombuffer(self._memory, dtype=geometry.dtype, count=numbers) if blocks else torch.empty(0)
        self._tensor = flat.view(blocks, *geometry.block_shape(block_size))
        self._written: set[int] = set()

    def block(self, block: int) -> torch.Tensor:
        """What was last written into the place of `block`."""
        return self._tensor[block]

    def write(self, block: int, kv: torch.Tensor) -> None:
        self._tensor[block].copy_(kv)
        self._written.add(block)

    def drop(self, blocks: Iterable[int]) -> None:
        """Give the memory of these places back to the system, by whole pages."""
        if not self._written:
            return
        page = mmap.PAGESIZE
        for block in self._written.intersection(blocks):
            start = -(-block * self._bytes // page) * page
            stop = (block + 1) * self._bytes // page * page
            if stop > start:
                self._memory.madvise(mmap.MADV_DONTNEED, start, stop - start)
            self._written.discard(block)

    @property
    def written(self) -> frozenset[int]:
        """Places that hold real memory."""
        return frozenset(self._written)
