"""The shape of a model's KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Geometry:
    """What every layer caches a position: `kv_heads` keys and as many values of `head_dim` numbers."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def block_shape(self, block_size: int) -> tuple[int, int, int, int, int]:
        """[layer, 2, kv_head, slot, head_dim]: one block of a block-major pool."""
        return (self.layers, 2, self.kv_heads, block_size, self.head_dim)

    def token_bytes(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    def block_bytes(self, block_size: int) -> int:
        return self.token_bytes() * block_size
