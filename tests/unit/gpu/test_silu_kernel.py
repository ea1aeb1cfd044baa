"""The gated activation is that of the modules it replaces."""

from __future__ import annotations

import pytest
import torch

from prelay_engine import rowwise
from prelay_engine.gpu.kernels.silu import Name, silu_mul

FORMS: dict[Name, rowwise.Function] = {"silu": rowwise.silu, "gelu": rowwise.gelu, "gelu_tanh": rowwise.gelu_tanh}


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("width", [1, 100, 1024, 2500])
def test_it_is_the_activation_of_the_engine_on_a_cpu_times_the_other_half(name: Name, width: int) -> None:
    fused = numbers(9, 2 * width)
    expected = FORMS[name](fused[:, :width]) * fused[:, width:]
    torch.testing.assert_close(silu_mul(fused, name), expected, rtol=3e-6, atol=3e-6)


def test_the_activation_is_rounded_before_it_is_multiplied() -> None:
    fused = numbers(30, 2 * 500, dtype=torch.float16)
    expected = rowwise.silu(fused[:, :500]) * fused[:, 500:]
    given = silu_mul(fused)
    assert given.dtype == torch.float16
    # One in thousands of float32 results lies so near the middle that its last bit decides.
    assert (given != expected).float().mean() < 0.001
    torch.testing.assert_close(given, expected, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("name", FORMS)
def test_far_from_zero_it_is_the_gate_itself_or_nothing(name: Name) -> None:
    fused = torch.tensor([[-1e30, -1000.0, -100.0, 100.0, 1000.0, 1e30] + [1.0] * 6])
    if name == "gelu_tanh":
        fused.clamp_(-1e12, 1e12)  # its cube is a number
    expected = torch.where(fused[:, :6] > 0, fused[:, :6], 0.0)
    torch.testing.assert_close(silu_mul(fused, name), expected, rtol=1e-6, atol=1e-7)


def test_a_rows_bits_do_not_depend_on_how_many_rows_there_are() -> None:
    fused = numbers(9, 300)
    together = silu_mul(fused)
    for rows in (0, 1, 5):
        assert torch.equal(silu_mul(fused[:rows]), together[:rows])
    assert torch.equal(silu_mul(numbers(9, 310)[:, 4:304]), silu_mul(numbers(9, 310)[:, 4:304].clone()))
