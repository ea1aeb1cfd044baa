"""Attention with capped scores and sinks: the formula, and one set of bits for a row."""

from __future__ import annotations

import pytest
import torch

from prelay_engine import kernels
from prelay_engine.attention import Batch, Form, Span
from prelay_engine.blocks import BlockPool
from prelay_engine.contiguous import ContiguousKv
from prelay_engine.geometry import Geometry
from prelay_engine.masks import MaskCache

HEADS = [(6, 2, 8), (4, 4, 16), (8, 1, 12), (7, 1, 8)]  # heads, key heads, numbers a head
FORMS = [
    pytest.param(Form(0.3), True, id="sinks"),
    pytest.param(Form(0.3, window=40), True, id="sinks and a window"),
    pytest.param(Form(0.3, softcap=2.0), False, id="cap"),
    pytest.param(Form(0.3, window=40, softcap=2.0), True, id="cap, sinks and a window"),
]
LENGTH = 140


def by_formula(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, form: Form, sinks: torch.Tensor | None
) -> torch.Tensor:
    """[rows, head, dim], in float64 and without any of our tricks."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(group, 1) for x in (key, value))
    scores = query.double() @ key.transpose(2, 3) * form.scale
    if form.softcap is not None:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    rows, keys = torch.arange(LENGTH).unsqueeze(1), torch.arange(LENGTH)
    hidden = (keys > rows) | (keys <= rows - (form.window or LENGTH))
    weights = scores.masked_fill(hidden, float("-inf")).exp()
    total = weights.sum(-1) + (0 if sinks is None else sinks.double().exp().unsqueeze(1))
    return ((weights @ value) / total.unsqueeze(-1))[0].transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("form", "with_sinks"), FORMS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_attention_is_the_formula_and_its_rows_do_not_depend_on_the_cuts(
    heads: int, kv_heads: int, dim: int, form: Form, with_sinks: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(heads)
    query = (3 * torch.randn(1, heads, LENGTH, dim, generator=generator)).to(dtype)
    key, value = (torch.randn(1, kv_heads, LENGTH, dim, generator=generator).to(dtype) for _ in range(2))
    sinks = torch.randn(heads, generator=generator).to(dtype) if with_sinks else None

    def run(*cuts: int) -> torch.Tensor:
        store = ContiguousKv(Geometry(1, kv_heads, dim, dtype), BlockPool(16), 16)
        store.open("a", LENGTH, LENGTH)
        outs, masks = [], MaskCache()
        for start, stop in zip((0, *cuts), (*cuts, LENGTH), strict=True):
            part = slice(start, stop)
            batch = Batch(store, [Span("a", start, stop - start)], masks)
            outs.append(batch.attend(0, query[:, :, part], key[:, :, part], value[:, :, part], form, sinks)[0])
        return torch.cat(outs)

    whole = run()
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(
        whole.double(), by_formula(query, key, value, form, sinks), atol=tolerance, rtol=tolerance
    )
    assert torch.equal(whole, run(1, 2, 5, 63, 64, 65, 66, 100, 128, 139))


def test_a_sink_far_above_all_scores_leaves_nothing_and_one_far_below_everything() -> None:
    out, log_sum = torch.ones(2, 4), torch.tensor([1.0, 1.0])
    shared = kernels.beside_sink(out, log_sum, torch.tensor([500.0, -500.0]))
    assert torch.equal(shared, torch.tensor([[0.0] * 4, [1.0] * 4]))
