"""Where keys and values are kept between steps: the interface, and the paged store of prefill workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import torch

from .blocks import BlockPool, BlockState
from .geometry import Geometry
from .native.lib import Place
from .prefix import Chain


class Cursor(Protocol):
    """One sequence's part of one step: `length` new positions from `start`, which attend to [first, stop).

    Good for that step only.
    """

    def write(self, layer: int, kv: torch.Tensor) -> None:
        """Store the new positions' `kv` [2, kv_head, length, head_dim]."""

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [1, kv_head, stop - first, head_dim]; finite beyond the last written position."""


class KvStore(ABC):
    """The keys and values of many sequences, by key, accounted in blocks of `pool`.

    With `prefix_cache`, what sequences leave is kept as long as its blocks are not needed (see `prefix.py`).
    """

    def __init__(self, geometry: Geometry, pool: BlockPool, block_size: int, prefix_cache: bool) -> None:
        self.geometry = geometry
        self.pool = pool
        self.block_size = block_size
        self.prefix_cache = prefix_cache

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    @abstractmethod
    def open(
        self,
        key: str,
        tokens: int,
        limit: int,
        state: BlockState = BlockState.IN_USE,
        prefix: Iterable[bytes] = (),
    ) -> int:
        """Take the blocks for `tokens` positions of a new sequence. It never grows beyond `limit` positions.

        `prefix` names its first blocks; those that are here need not be computed. The result is how many positions
        they are. Raises NoRoom, changing nothing.
        """

    @abstractmethod
    def name(self, key: str, chain: Chain, first: int, stop: int) -> None:
        """Blocks [first, stop) of `key` were written to their ends: others that begin alike may have them."""

    @abstractmethod
    def share(self, key: str, index: int, digest: bytes) -> bool:
        """Let `key` have block `index`, which it has not computed, from another that named it; False if none did."""

    def grow(self, key: str, tokens: int) -> list[int]:
        """Take the blocks that are missing for `tokens` positions, and return them. Raises NoRoom, changing nothing."""
        missing = self.blocks_for(tokens) - self.pool.count(key)
        return self.pool.take(key, missing) if missing > 0 else []

    def close(self, key: str) -> None:
        """Give everything of `key` back."""
        self.pool.give_back(key)

    @abstractmethod
    def cursor(self, key: str, start: int, length: int, first: int, stop: int) -> Cursor:
        """A view for one step; `start + length` positions must have been taken before."""

    @abstractmethod
    def place(self, key: str) -> Place:
        """Where the keys and values of `key` lie now, for kernels that read them there. Good for one step only."""


class PagedKv(KvStore):
    """Blocks in a tensor of the caller's, `[block, layer, 2, kv_head, slot, head_dim]`, gathered to be read.

    The tensor may be a shared memory mapping that other processes copy from; only this object writes it. Sequences
    that begin alike share the blocks themselves.
    """

    def __init__(
        self, geometry: Geometry, pool: BlockPool, block_size: int, tensor: torch.Tensor, prefix_cache: bool = False
    ) -> None:
        super().__init__(geometry, pool, block_size, prefix_cache)
        expected = (pool.size, *geometry.block_shape(block_size))
        if tuple(tensor.shape) != expected or tensor.dtype != geometry.dtype:
            raise ValueError(f"the KV tensor is {tuple(tensor.shape)} {tensor.dtype}, not {expected} {geometry.dtype}")
        self.tensor = tensor
        self._strides = [stride * tensor.itemsize for stride in tensor.stride()[:5]]
        self._scratch = torch.zeros(2, 1, geometry.kv_heads, 0, geometry.head_dim, dtype=geometry.dtype)

    def open(
        self,
        key: str,
        tokens: int,
        limit: int,  # noqa: ARG002 - blocks come one by one
        state: BlockState = BlockState.IN_USE,
        prefix: Iterable[bytes] = (),
    ) -> int:
        shared = self.pool.match(prefix)
        self.pool.take(key, self.blocks_for(tokens) - len(shared), state, shared)
        return len(shared) * self.block_size

    def name(self, key: str, chain: Chain, first: int, stop: int) -> None:
        for index in range(first, stop):
            self.pool.name(key, index, chain[index])

    def share(self, key: str, index: int, digest: bytes) -> bool:
        return self.pool.share(key, index, digest)

    def export(self, key: str) -> tuple[list[int], list[int]]:
        """The blocks of `key` in the order of their positions, and the generation each has now."""
        blocks = list(self.pool.blocks(key))
        return blocks, [int(x) for x in self.pool.generations[blocks]]

    def cursor(self, key: str, start: int, length: int, first: int, stop: int) -> Cursor:
        return _PagedCursor(self, self.pool.blocks(key), start, length, first, stop)

    def place(self, key: str) -> Place:
        block, layer, kind, head, slot = self._strides
        blocks = np.array(self.pool.blocks(key), dtype=np.int64) * block + self.tensor.data_ptr()
        return Place(blocks, layer, kind, head, slot, self.block_size)

    def scratch(self, slots: int) -> torch.Tensor:
        """[2, 1, kv_head, at least `slots`, head_dim] to gather into; what it holds is finite."""
        if self._scratch.shape[3] < slots:
            shape = (*self._scratch.shape[:3], max(slots, 2 * self._scratch.shape[3]), self._scratch.shape[4])
            self._scratch = torch.zeros(shape, dtype=self._scratch.dtype)
        return self._scratch


class _PagedCursor:
    def __init__(self, store: PagedKv, blocks: tuple[int, ...], start: int, length: int, first: int, stop: int) -> None:
        size = store.block_size
        table = torch.tensor(blocks)
        positions = torch.arange(start, start + length)
        self._store = store
        self._write_to = (table[positions // size], positions % size)
        self._valid, self._count = start + length - first, stop - first
        self._read_from = table[first // size : -(-(start + length) // size)]

    def write(self, layer: int, kv: torch.Tensor) -> None:
        blocks, slots = self._write_to
        self._store.tensor[:, layer][blocks, :, :, slots] = kv.permute(2, 0, 1, 3)

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        count, size = len(self._read_from), self._store.block_size
        scratch = self._store.scratch(max(self._count, count * size))
        gathered = self._store.tensor[:, layer].index_select(0, self._read_from)  # [block, 2, head, slot, dim]
        target = scratch[:, 0, :, : count * size].unflatten(2, (count, size))
        target.copy_(gathered.permute(1, 2, 0, 3, 4))
        # What stands beyond the last position may be another sequence's: 0 · NaN would be NaN.
        scratch[:, :, :, self._valid : self._count].zero_()
        keys, values = scratch[:, :, :, : self._count]
        return keys, values
