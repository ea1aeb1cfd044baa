"""The norm in one kernel is the norm in many."""

from __future__ import annotations

import pytest
import torch

from prelay_engine.gpu.kernels.norm import rms_norm
from prelay_engine.rowwise import RMSNorm

EPS = 1e-6


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [1, 100, 128, 2880, 4096, 5000, 9001])
def test_it_is_the_norm_of_the_engine_on_a_cpu(dtype: torch.dtype, width: int) -> None:
    x, weight = numbers(11, width, dtype=dtype) * 3, numbers(width, seed=1)
    given, expected = rms_norm(x, weight, EPS), RMSNorm(weight, EPS)(x)
    assert given.dtype == dtype
    # Two float32 computations of the same number may be rounded to neighbours.
    torch.testing.assert_close(given, expected, rtol=max(2e-6, 1.01 * torch.finfo(dtype).eps), atol=1e-7)


@pytest.mark.parametrize("width", [128, 5000])
def test_a_rows_bits_do_not_depend_on_its_place_or_its_neighbours(width: int) -> None:
    x, weight = numbers(40, width), numbers(width, seed=1)
    together = rms_norm(x, weight, EPS)
    for rows in (1, 2, 7, 8, 9, 17):
        assert torch.equal(rms_norm(x[:rows], weight, EPS), together[:rows])
        assert torch.equal(rms_norm(x[rows:], weight, EPS), together[rows:])


def test_heads_inside_fused_rows_are_normed_as_heads_by_themselves() -> None:
    fused, weight = numbers(5, 7 * 64, dtype=torch.float16), numbers(64, seed=1)
    keys = fused[:, 2 * 64 : 5 * 64].view(5, 3, 64)
    given = rms_norm(keys, weight, EPS)
    assert given.is_contiguous()
    assert torch.equal(given, rms_norm(keys.reshape(15, 64), weight, EPS).view(5, 3, 64))


def test_tokens_stand_in_either_place_of_what_is_normed() -> None:
    x, weight = numbers(6, 5, 64), numbers(64, seed=1)
    apart = rms_norm(x.reshape(30, 64), weight, EPS)
    assert torch.equal(rms_norm(x.view(1, 30, 64), weight, EPS)[0], apart)
    assert torch.equal(rms_norm(x.transpose(0, 1), weight, EPS).transpose(0, 1).reshape(30, 64), apart)
    assert torch.equal(rms_norm(x[:1].transpose(0, 1), weight, EPS)[:, 0], apart[:5])


def test_a_row_of_zeros_stays_zero_and_no_rows_stay_none() -> None:
    assert not rms_norm(torch.zeros(2, 50), numbers(50), EPS).any()
    assert rms_norm(torch.zeros(0, 3, 50), numbers(50), EPS).shape == (0, 3, 50)
