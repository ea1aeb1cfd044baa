from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from prelay_engine import attention, experts, kernels, linear, loading, masks, rowwise
from prelay_engine.config import EngineConfig
from prelay_engine.errors import ModelError
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

    def careless(weight: torch.Tensor, bias: torch.Tensor | None, _: object = None) -> linear.Kernel:
        kernel, flipped = real(weight, bias), real(weight.flip(1), bias)
        return lambda x: kernel(x) if x.shape[1] > 4 else flipped(x.flip(-1))

    monkeypatch.setattr(linear, "pack", careless)
    model = load(EngineConfig(model=tiny_folder("llama"), dtype="float32", kernels="torch"))
    assert not model.exact
    assert "linear 48→80" in model.exactness


def test_it_finds_an_activation_with_a_remainder_of_its_own(
    tiny_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rowwise, "_ACTIVATIONS", ())
    model = load(EngineConfig(model=tiny_folder("llama"), dtype="float32", kernels="torch"))
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        assert not model.exact
        assert "activation" in model.exactness


def test_it_finds_attention_over_keys_up_to_the_row_instead_of_to_the_end_of_its_block(
    tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.nn.functional.scaled_dot_product_attention

    def trimmed(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, attn_mask: torch.Tensor, scale: float
    ) -> torch.Tensor:
        if attn_mask.shape[2] == 1:
            seen = int((attn_mask == 0).sum())
            keys, values, attn_mask = keys[:, :, :seen], values[:, :, :seen], attn_mask[..., :seen]
        return real(query, keys, values, attn_mask=attn_mask, scale=scale)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", trimmed)
    assert "attention" in run_selftest(tiny_model("float32", "torch")).text


def test_it_finds_attention_whose_folded_rows_are_not_filled_up_to_four(
    tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = masks.Masks.rows

    def unfilled(self: masks.Masks, start: int, count: int, group: int) -> torch.Tensor:
        return real(self, start, count, group)[:, :, : count * group]

    monkeypatch.setattr(attention, "pad", lambda x, _sizes: x)
    monkeypatch.setattr(masks.Masks, "rows", unfilled)
    assert "attention" in run_selftest(tiny_model("float32", "torch")).text


def test_weights_in_a_module_of_unknown_kind_forbid_a_promise(tiny_model: LoadModel) -> None:
    model = tiny_model("float32")
    model.net.extra = nn.Bilinear(2, 3, 4)
    try:
        result = run_selftest(model)
    finally:
        del model.net.extra
    assert not result.exact
    assert "Bilinear" in result.text


CAPPED = {"attn_logit_softcapping": 5.0, "sliding_window": 40, "query_pre_attn_scalar": 16}


def test_it_finds_capped_scores_whose_product_has_the_shape_of_the_chunk(
    tiny_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load(EngineConfig(model=tiny_folder("gemma2", **CAPPED), dtype="float32", kernels="torch")).exact
    real = kernels.capped

    def careless(query: torch.Tensor, *given: Any) -> kernels.Output:
        out, log_sum = real(query, *given)
        empty = (query == 0).all(-1)
        return out * (1 + 1e-6 * empty.sum()), log_sum  # what other rows are there shows in the result

    monkeypatch.setattr(kernels, "capped", careless)
    model = load(EngineConfig(model=tiny_folder("gemma2", **CAPPED), dtype="float32", kernels="torch"))
    assert not model.exact
    assert "attention (window 40, cap 5)" in model.exactness


def test_it_finds_a_mixture_whose_sigmoids_or_experts_are_torch_s_own(
    tiny_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2}
    monkeypatch.setattr(experts, "_agree", lambda *_: False)
    model = load(EngineConfig(model=tiny_folder("mixtral", **sizes), dtype="float32"))
    assert not model.exact
    assert "MixtralExperts" in model.exactness


def test_a_model_that_carries_a_state_is_refused_even_if_no_name_gives_it_away(
    tiny_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
    folder = tiny_folder("falcon_h1", **sizes)
    with pytest.raises(ModelError, match="is a hybrid or recurrent model"):
        load(EngineConfig(model=folder, dtype="float32"))
    monkeypatch.setattr(loading, "_refuse_by_modules", lambda _: None)
    with pytest.raises(ModelError, match="carries more from token to token than keys and values"):
        load(EngineConfig(model=folder, dtype="float32"))
