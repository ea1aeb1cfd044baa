"""The reference that travels with a job from its prefill worker to a decode worker."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from .checks import MAX_UINT64, exact_fields, need_int
from .errors import BadKvRef
from .layout import KvLayout
from .segment import Segment


@dataclass(frozen=True, slots=True)
class KvRef:
    """The KV of one sequence: positions 0 … tokens-1 in `blocks`, in order, each at its generation.

    The blocks hold what they should as long as the segment's generation table agrees with `generations`.
    ValueError when the parts contradict each other.
    """

    segment: Segment
    blocks: tuple[int, ...]
    generations: tuple[int, ...]
    tokens: int
    layout: KvLayout

    def __post_init__(self) -> None:
        for block in self.blocks:
            need_int("blocks", block, 0, self.layout.num_blocks - 1)
        for generation in self.generations:
            need_int("generations", generation, 0, MAX_UINT64)
        need_int("tokens", self.tokens, 1, len(self.blocks) * self.layout.block_size)
        if len(set(self.blocks)) != len(self.blocks):
            raise ValueError("a block is named twice")
        if len(self.generations) != len(self.blocks):
            raise ValueError(f"{len(self.blocks)} blocks but {len(self.generations)} generations")
        ours = (self.layout.nbytes, self.layout.layout_hash, self.layout.numerics_hash)
        if ours != (self.segment.nbytes, self.segment.layout_hash, self.segment.numerics_hash):
            raise ValueError("segment and layout disagree")

    def encode(self) -> bytes:
        return orjson.dumps(
            {
                "segment": self.segment.as_dict(),
                "blocks": self.blocks,
                "generations": self.generations,
                "tokens": self.tokens,
                "layout": self.layout.as_dict(),
            }
        )

    @classmethod
    def decode(cls, raw: bytes) -> KvRef:
        """Raise BadKvRef, with the raw bytes kept, when `raw` is not a reference."""
        try:
            data = exact_fields(cls, orjson.loads(raw))
            return cls(
                segment=Segment.from_dict(data["segment"]),
                blocks=tuple(data["blocks"]),
                generations=tuple(data["generations"]),
                tokens=data["tokens"],
                layout=KvLayout.from_dict(data["layout"]),
            )
        except (ValueError, TypeError) as error:
            raise BadKvRef(raw, str(error)) from None
