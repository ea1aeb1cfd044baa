from __future__ import annotations

import pytest
import torch
from torch import nn

from prelay_engine import attention, linear, masks, rowwise
from prelay_engine.config import EngineConfig
from prelay_engine.loading import load
from prelay_engine.selftest import run_selftest

from .conftest import LoadModel, MakeFolder


def test_it_passes_here_and_says_so(tiny_model: LoadModel) -> None:
    result = run_selftest(tiny_model("float32"))
    assert result.exact
    assert "do not depend on their neighbours" in result.text


def test_it_finds_a_linear_that_sums_a_small_batch_in_another_order(
    tiny_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = linear.pack

    def careless(weight: torch.Tensor, bias: torch.Tensor | None) -> linear.Kernel:
        kernel, flipped = real(weight, bias), real(weight.flip(1), bias)
        return lambda x: kernel(x) if x.shape[1] > 4 else flipped(x.flip(-1))

    monkeypatch.setattr(linear, "pack", careless)
    model = load(EngineConfig(model=tiny_folder("llama"), dtype="float32"))
    assert not model.exact
    assert "linear 48→80" in model.exactness


def test_it_finds_an_activation_with_a_remainder_of_its_own(
    tiny_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rowwise, "_ACTIVATIONS", ())
    model = load(EngineConfig(model=tiny_folder("llama"), dtype="float32"))
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        assert not model.exact
        assert "activation" in model.exactness


def test_it_finds_attention_over_keys_up_to_the_row_instead_of_to_the_end_of_its_block(
    tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = attention.scaled_dot_product_attention

    def trimmed(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, attn_mask: torch.Tensor, scale: float
    ) -> torch.Tensor:
        if attn_mask.shape[2] == 1:
            seen = int((attn_mask == 0).sum())
            keys, values, attn_mask = keys[:, :, :seen], values[:, :, :seen], attn_mask[..., :seen]
        return real(query, keys, values, attn_mask=attn_mask, scale=scale)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", trimmed)
    assert "attention" in run_selftest(tiny_model("float32")).text


def test_it_finds_attention_whose_folded_rows_are_not_filled_up_to_four(
    tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = masks.Masks.rows

    def unfilled(self: masks.Masks, start: int, count: int, group: int) -> torch.Tensor:
        return real(self, start, count, group)[:, :, : count * group]

    monkeypatch.setattr(attention, "pad", lambda x, _sizes: x)
    monkeypatch.setattr(masks.Masks, "rows", unfilled)
    assert "attention" in run_selftest(tiny_model("float32")).text


def test_weights_in_a_module_of_unknown_kind_forbid_a_promise(tiny_model: LoadModel) -> None:
    model = tiny_model("float32")
    model.net.extra = nn.Bilinear(2, 3, 4)
    try:
        result = run_selftest(model)
    finally:
        del model.net.extra
    assert not result.exact
    assert "Bilinear" in result.text
