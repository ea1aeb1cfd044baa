"""The decode side's KV store: the keys of a sequence lie side by side, so that attention reads them without a copy."""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import torch

from .blocks import BlockPool, BlockState
from .config import POSITION_BLOCK
from .errors import NoRoom, UnknownSequence
from .geometry import Geometry
from .kv import Cursor, KvStore

#: Linux: do not reserve swap for the mapping; most of it is never touched.
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)


class ContiguousKv(KvStore):
    """One buffer `[layer, 2, 1, kv_head, position, head_dim]` a sequence, accounted in blocks of the pool.

    A buffer is mapped for the sequence's limit at once, and the system gives it real memory, filled with
    zeros, only page by page as positions are written: nothing is ever moved when a sequence grows, and what
    one sequence has written is never seen by another.
    """

    def __init__(self, geometry: Geometry, pool: BlockPool, block_size: int) -> None:
        super().__init__(geometry, pool, block_size)
        self._buffers: dict[str, _Buffer] = {}

    def open(self, key: str, tokens: int, limit: int, state: BlockState = BlockState.IN_USE) -> None:
        super().open(key, tokens, limit, state)
        try:
            self._buffers[key] = _Buffer(self.geometry, max(tokens, limit))
        except OSError as error:
            self.pool.move(key, BlockState.IN_USE)
            self.pool.give_back(key)
            raise NoRoom(f"cannot map the KV buffer of {limit} positions: {error.strerror}") from None

    def close(self, key: str) -> None:
        super().close(key)
        del self._buffers[key]

    def cursor(self, key: str, start: int, length: int, first: int, stop: int) -> Cursor:
        return _ContiguousCursor(self._buffers[key], start, length, first, stop)

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
        memory = mmap.mmap(-1, geometry.token_bytes() * positions, flags=_FLAGS)
        self.data = torch.frombuffer(memory, dtype=geometry.dtype).view(shape)
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
