"""The product of exact mode: right to its last rounding, and the same bits for any number of rows."""

from __future__ import annotations

import pytest
import torch

from prelay_engine.gpu.kernels import linear as module
from prelay_engine.gpu.kernels.linear import linear, tile_of

DTYPES = [torch.float32, torch.float16]


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns", "depth"),
    [(1, 1, 1), (3, 64, 64), (130, 70, 33), (64, 65, 200), (1200, 130, 20)],
)
def test_products_are_those_of_exact_arithmetic_rounded_once(
    dtype: torch.dtype, rows: int, columns: int, depth: int
) -> None:
    x, weight, bias = numbers(rows, depth, dtype=dtype), numbers(columns, depth, seed=1, dtype=dtype), numbers(columns)
    exact = x.double() @ weight.double().T + bias.double()
    # Of `depth` products, added up in float32; and one rounding.
    summed = (x.double().abs() @ weight.double().abs().T + bias.double().abs()) * depth * 2.0**-24
    rounded = exact.abs() * torch.finfo(dtype).eps / 2
    given = linear(x, weight, bias)
    assert given.dtype == dtype
    assert bool(((given.double() - exact).abs() <= summed + rounded + 1e-7).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [1, 8192])
def test_a_rows_bits_do_not_depend_on_how_many_rows_there_are(
    dtype: torch.dtype, wide: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WIDE", wide)  # the tile of a weight with many columns, for one with few
    x, weight, bias = numbers(150, 90, dtype=dtype), numbers(150, 90, seed=1, dtype=dtype), numbers(150)
    together = linear(x, weight, bias)
    for rows in (1, 2, 17, 64, 65, 129):
        assert torch.equal(linear(x[:rows], weight, bias), together[:rows])


def test_a_row_has_the_same_bits_in_every_place_and_beside_any_others() -> None:
    x, weight = numbers(80, 100), numbers(70, 100, seed=1)
    together = linear(x, weight)
    order = torch.randperm(80, generator=torch.Generator().manual_seed(2))
    assert torch.equal(linear(x[order], weight), together[order])
    beside = x.clone()
    beside[1::2] = torch.nan
    assert torch.equal(linear(beside, weight)[::2], together[::2])


def test_rows_at_a_distance_are_computed_as_rows_side_by_side() -> None:
    x, weight = numbers(20, 100), numbers(70, 100, seed=1)
    assert torch.equal(linear(x[:, 30:80], weight[:, 30:80]), linear(x[:, 30:80].clone(), weight[:, 30:80].clone()))


def test_without_rows_nothing_is_computed() -> None:
    assert linear(numbers(0, 8), numbers(5, 8)).shape == (0, 5)


def test_tiles_are_of_a_dtype_and_a_weight_and_fit_a_multiprocessor() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for columns in (64, 4096, 128256):
            tile = tile_of(dtype, columns)
            held = tile.stages * (tile.rows + tile.columns) * tile.depth * dtype.itemsize
            assert held <= 227 * 1024, "shared memory of a multiprocessor of an H100 or H200"
