"""The step that tells how much memory steps take has all that one may have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from prelay_engine.attention import Span
from prelay_engine.blocks import BlockPool
from prelay_engine.geometry import Geometry
from prelay_engine.gpu.model import GpuModel
from prelay_engine.gpu.sizing import LargestStep
from prelay_engine.kv import PagedKv
from prelay_engine.sampler import Draw

BLOCK = 16


class Model:
    """Notes what is to be computed."""

    vocab_size, context_len = 50, 100
    geometry = Geometry(layers=1, kv_heads=1, head_dim=8, dtype=torch.float32)

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.draws: list[int] = []

    def store(self, blocks: int, block_size: int) -> PagedKv:
        pool = torch.zeros(blocks, *self.geometry.block_shape(block_size))
        return PagedKv(self.geometry, BlockPool(blocks), block_size, pool)

    def step(
        self, store: PagedKv, spans: Sequence[Span], ids: Sequence[int], draws: Sequence[tuple[int, Draw]], _: Any
    ) -> None:
        assert store.pool.free == 0
        assert len(ids) == sum(span.length for span in spans)
        self.spans, self.draws = list(spans), [row for row, _ in draws]


@pytest.mark.parametrize(
    ("tokens", "prompts"), [(30, [30]), (99, [99]), (100, [99, 1]), (250, [99, 99, 52])], ids=["short", "1", "2", "3"]
)
def test_it_has_single_rows_and_a_whole_chunk_of_prompts(tokens: int, prompts: list[int]) -> None:
    model = Model()
    step = LargestStep(cast(GpuModel, model), BLOCK)
    step(tokens, 3)
    assert [span.length for span in model.spans if span.key.isdigit()] == [1, 1, 1]
    assert [span.length for span in model.spans if not span.key.isdigit()] == sorted(
        prompts, key=lambda length: length > 1
    )
    assert [span.length > 1 for span in model.spans] == sorted(span.length > 1 for span in model.spans)
    assert model.draws == [0, 1, 2, tokens + 2]
    assert step.nbytes == (3 + sum(-(-length // BLOCK) for length in prompts)) * model.geometry.block_bytes(BLOCK)
