from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from prelay_engine.linear import FusedGroup, PackedLinear, replace_linears

DTYPES = [torch.float32, torch.bfloat16]


class Block(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(40, 24, bias=bias)
        self.k_proj = nn.Linear(40, 8, bias=bias)
        self.v_proj = nn.Linear(40, 8, bias=bias)
        self.other = nn.Linear(40, 16)
        self.turned = Conv1D(12, 40)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x), self.other(x), self.turned(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 9])
@torch.no_grad()
def test_replaced_linears_compute_what_they_computed(dtype: torch.dtype, bias: bool, rows: int) -> None:
    block = Block(bias).to(dtype)
    x = torch.randn(1, rows, 40).to(dtype)
    expected = block(x)
    assert replace_linears(block) == 5
    assert not list(block.parameters()), "the originals' weights are still held"
    for ours, theirs in zip(block(x), expected, strict=True):
        assert ours.dtype == dtype
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_a_row_has_the_same_bits_whatever_the_number_of_rows(dtype: torch.dtype) -> None:
    # More than 1,024 columns: where one row alone would be summed in another order.
    linear = PackedLinear(torch.randn(64, 1536).to(dtype), None)
    x = torch.randn(70, 1536).to(dtype)
    whole = linear(x)
    for start, count in ((7, 1), (7, 2), (3, 3), (30, 5), (7, 16), (20, 33), (0, 64)):
        assert torch.equal(linear(x[start : start + count]), whole[start : start + count])


@torch.no_grad()
def test_bfloat16_is_the_float32_product_of_the_same_values_rounded_once() -> None:
    weight, x = torch.randn(16, 40).bfloat16(), torch.randn(3, 40).bfloat16()
    exact = (x.double() @ weight.double().T).float()
    ours = PackedLinear(weight, None)(x).float()
    assert bool(((ours - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all())


@torch.no_grad()
def test_a_fused_group_answers_in_any_order_for_any_tensor_and_keeps_nothing() -> None:
    linears = [nn.Linear(8, size) for size in (4, 6)]
    group = FusedGroup(linears)
    x, other = torch.randn(2, 8), torch.randn(3, 8)
    for part, given in ((1, x), (0, x), (0, other), (1, x), (1, other), (0, other), (1, other)):
        torch.testing.assert_close(group.take(part, given), linears[part](given))
    group.take(0, other)
    assert group._input is None
    assert not group._parts


def test_linears_that_differ_in_input_or_bias_are_not_fused() -> None:
    block = Block(bias=True)
    block.k_proj = nn.Linear(40, 8, bias=False)
    replace_linears(block)
    assert isinstance(block.q_proj, PackedLinear)
