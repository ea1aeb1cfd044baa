"""Mixtures of experts: transformers' own values, and bits that do not depend on who chose what beside a row."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from prelay_engine.experts import Mixture, PackedExperts, replace_experts
from prelay_engine.linear import replace_linears
from prelay_engine.rowwise import replace_rowwise

KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 5},
    "gpt_oss": {"num_local_experts": 5},  # weights the other way round, biases, a gate of its own
    "glm4_moe": {"n_routed_experts": 5, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},  # sigmoids
}
SIZES = {
    "vocab_size": 50,
    "hidden_size": 36,
    "intermediate_size": 44,
    "moe_intermediate_size": 44,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}


def block_of(kind: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(2)
    config = AutoConfig.for_model(kind, **(SIZES | KINDS[kind]))
    net = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    for weight in net.parameters():
        weight.data.normal_(0, 0.4)
    block: nn.Module = net.model.layers[0].mlp
    return block.to(dtype)


def first(given: Any) -> torch.Tensor:
    return given[0] if isinstance(given, tuple) else given  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_replaced_mixture_gives_what_it_gave_and_holds_no_weights_twice(kind: str, dtype: torch.dtype) -> None:
    block = block_of(kind, dtype)
    theirs = copy.deepcopy(block)
    x = torch.randn(1, 21, 36, generator=torch.Generator().manual_seed(1)).to(dtype)
    freed: list[int] = []
    expected = first(theirs(x))
    assert replace_experts(block, freed.append) == 1
    assert isinstance(block.experts, PackedExperts)
    assert sum(freed) == sum(weight.nbytes for weight in theirs.get_submodule("experts").parameters())
    assert not list(block.experts.parameters())
    off = (first(block(x)).float() - expected.float()).abs() / expected.float().abs().max()
    # In bfloat16 a rounding may send a row through other experts.
    assert float(off.max()) < 1e-5 if dtype == torch.float32 else float(off.median()) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_row_of_a_mixture_has_the_same_bits_whatever_its_neighbours_choose(kind: str, dtype: torch.dtype) -> None:
    block = block_of(kind, dtype)
    replace_linears(block)  # of shared experts
    assert replace_experts(block) == 1
    replace_rowwise(block)
    x = torch.randn(1, 70, 36, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = first(block(x))
    for start, count in ((0, 1), (3, 2), (17, 31), (5, 64), (69, 1)):
        assert torch.equal(first(block(x[:, start : start + count])), whole[:, start : start + count])


@torch.no_grad()
def test_experts_that_ours_do_not_agree_with_are_left_alone() -> None:
    block = block_of("mixtral", torch.float32)
    kind = type(block.experts)

    class Odd(kind):  # type: ignore[misc, valid-type]
        def forward(self, *given: torch.Tensor) -> torch.Tensor:
            return super().forward(*given) + 1  # type: ignore[no-any-return]

    block.experts.__class__ = Odd
    assert replace_experts(block) == 0
    assert isinstance(block.experts, Odd)
    assert not isinstance(block.forward, Mixture)
