"""The decode side's KV store: the keys of a sequence lie side by side, so that attention reads them without a copy."""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import numpy as np
import torch

from .blockcopies import LAZY, BlockCopies
from .blocks import BlockPool, BlockState
from .config import POSITION_BLOCK
from .errors import NoRoom, UnknownSequence
from .geometry import Geometry
from .kv import Cursor, KvStore
from .native.lib import Place
from .prefix import Chain


class ContiguousKv(KvStore):
    """One buffer `[layer, 2, 1, kv_head, position, head_dim]` a sequence, accounted in blocks of the pool.

    A buffer is mapped for the sequence's limit at once, and the system gives it real memory, filled with
    zeros, only page by page as positions are written: nothing is ever moved when a sequence grows, and what
    one sequence has written is never seen by another.

    Sequences that begin alike cannot share such memory. The prefix cache here is of copies in blocks of their own: a
    hit copies them into the sequence's buffer, which takes a hundredth of the time that computing them would.
    """

    def __init__(self, geometry: Geometry, pool: BlockPool, block_size: int, prefix_cache: bool = False) -> None:
        super().__init__(geometry, pool, block_size, prefix_cache)
        self._buffers: dict[str, _Buffer] = {}
        self._copies = BlockCopies(geometry, pool.size if prefix_cache else 0, block_size)

    def open(
        self,
        key: str,
        tokens: int,
        limit: int,
        state: BlockState = BlockState.IN_USE,
        prefix: Iterable[bytes] = (),
    ) -> int:
        found = self.pool.match(prefix)
        self.pool.touch(found)
        taken = self.pool.take(key, self.blocks_for(tokens), state)
        try:
            self._buffers[key] = _Buffer(self.geometry, max(tokens, limit))
        except OSError as error:
            self.pool.move(key, BlockState.IN_USE)
            self.pool.give_back(key)
            raise NoRoom(f"cannot map the KV buffer of {limit} positions: {error.strerror}") from None
        # Some of the blocks found may be among those taken. What was copied into them stands until it is dropped.
        self.import_blocks(key, (self._copies.block(block) for block in found), len(found) * self.block_size)
        self._copies.drop(taken)
        return len(found) * self.block_size

    def grow(self, key: str, tokens: int) -> list[int]:
        taken = super().grow(key, tokens)
        self._copies.drop(taken)
        return taken

    def close(self, key: str) -> None:
        super().close(key)
        buffer = self._buffers.pop(key)
        if buffer.chain is not None:  # what had to make room for this very sequence has room now
            self._keep(buffer, buffer.chain, buffer.named)

    def name(self, key: str, chain: Chain, first: int, stop: int) -> None:
        buffer = self._buffers[key]
        buffer.chain, buffer.named = chain, stop
        if len(self.pool.match(chain.digests[:first])) == first:  # else nobody would find what follows
            self._keep(buffer, chain, stop)

    def _keep(self, buffer: _Buffer, chain: Chain, stop: int) -> None:
        """Keep copies of the first `stop` blocks, as far as there are blocks for them: the beginning before the end."""
        known = self.pool.match(chain.digests[:stop])
        self.pool.touch(known)
        for index in reversed(range(len(known), min(stop, self.pool.available))):
            block = self.pool.keep(chain[index])
            if block is not None:
                start = index * self.block_size
                self._copies.write(block, buffer.data[:, :, 0, :, start : start + self.block_size])
        self.pool.touch(known)

    def share(self, key: str, index: int, digest: bytes) -> bool:
        found = self.pool.match((digest,))
        for block in found:
            start = index * self.block_size
            self._buffers[key].data[:, :, 0, :, start : start + self.block_size].copy_(self._copies.block(block))
        return bool(found)

    def cursor(self, key: str, start: int, length: int, first: int, stop: int) -> Cursor:
        return _ContiguousCursor(self._buffers[key], start, length, first, stop)

    def place(self, key: str) -> Place:
        return self._buffers[key].place

    def import_blocks(self, key: str, source: Iterable[torch.Tensor], tokens: int) -> None:
        """Copy the first `tokens` positions out of `source`, blocks `[layer, 2, kv_head, slot, head_dim]` in order.

        `source` may be one tensor `[block, …]`. Touches this sequence's buffer and nothing else, so another
        thread may run it while the engine steps, as long as the sequence is COPYING.
        """
        try:
            buffer = self._buffers[key]
        except KeyError:
            raise UnknownSequence(f"{key} has no KV buffer") from None
        size, copied = self.block_size, 0
        for block in source:
            count = min(size, tokens - copied)
            if count <= 0:
                break
            buffer.data[:, :, 0, :, copied : copied + count].copy_(block[:, :, :, :count])
            copied += count
        if copied < tokens:
            raise ValueError(f"the blocks of {key} hold {copied} positions, not {tokens}")


class _Buffer:
    """Memory of one sequence, and the views of it that stay good for many steps."""

    def __init__(self, geometry: Geometry, limit: int) -> None:
        positions = -(-limit // POSITION_BLOCK) * POSITION_BLOCK
        shape = (geometry.layers, 2, 1, geometry.kv_heads, positions, geometry.head_dim)
        memory = mmap.mmap(-1, geometry.token_bytes() * positions, flags=LAZY)
        self.data = torch.frombuffer(memory, dtype=geometry.dtype).view(shape)
        self.chain: Chain | None = None  # names the first `named` blocks
        self.named = 0
        layer, kind, _, head, slot = (stride * self.data.itemsize for stride in self.data.stride()[:5])
        #: The whole buffer as one block.
        self.place = Place(np.array([self.data.data_ptr()]), layer, kind, head, slot, positions)
        self._range = (0, 0)
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []

    def views(self, first: int, stop: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of each layer the keys and values [1, kv_head, stop - first, head_dim]."""
        if self._range != (first, stop):
            self._range = (first, stop)
            layers = self.data.narrow(4, first, stop - first).unbind(0)
            self._views = [(keys, values) for keys, values in (layer.unbind(0) for layer in layers)]
        return self._views


class _ContiguousCursor:
    def __init__(self, buffer: _Buffer, start: int, length: int, first: int, stop: int) -> None:
        self._targets = buffer.data.narrow(4, start, length).squeeze(2).unbind(0)
        self._views = buffer.views(first, stop)

    def write(self, layer: int, kv: torch.Tensor) -> None:
        self._targets[layer].copy_(kv)

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._views[layer]
