"""How KV blocks lie in memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from .checks import MAX_NBYTES, exact_fields, need_int, need_text

#: Bytes per element, by torch's name of the dtype.
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """One pool of KV blocks: `[block, layer, 2, kv_head, slot, head_dim]`, 2 being keys then values.

    A block is one contiguous range. Two pools with equal `layout_hash` (model, dtype, block size, heads, RoPE)
    can exchange blocks; only with equal `numerics_hash` (ISA, threads, library versions, quantisation) are they
    promised to hold the same bits for the same tokens. ValueError when a field is out of its range.
    """

    num_blocks: int
    layers: int
    kv_heads: int
    block_size: int  # slots (tokens) per block
    head_dim: int
    dtype: str
    layout_hash: str
    numerics_hash: str

    def __post_init__(self) -> None:
        for name in ("num_blocks", "layers", "kv_heads", "block_size", "head_dim"):
            need_int(name, getattr(self, name), 1)
        if not isinstance(self.dtype, str) or self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype must be one of {sorted(ITEM_BYTES)}, not {self.dtype!r:.40}")
        need_int("nbytes", self.nbytes, 1, MAX_NBYTES)
        need_text("layout_hash", self.layout_hash)
        need_text("numerics_hash", self.numerics_hash)

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        return (self.num_blocks, self.layers, 2, self.kv_heads, self.block_size, self.head_dim)

    @property
    def block_nbytes(self) -> int:
        return prod(self.shape[1:]) * ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * self.block_nbytes

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: object) -> KvLayout:
        """Raise ValueError when `data` is not a layout."""
        return cls(**exact_fields(cls, data))
