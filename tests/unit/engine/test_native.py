"""The native kernels by themselves: what they compute, that a row's bits are its own, and how they come to be."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from prelay_engine.demo import default_cache
from prelay_engine.native import build
from prelay_engine.native.arena import Arena
from prelay_engine.native.build import NoKernels, library
from prelay_engine.native.lib import Kernels

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 8e-3}


def made(threads: int, *, eight: bool) -> Kernels:
    return Kernels(library(default_cache(), print), threads, eight)


@pytest.fixture(scope="module", params=[1, 3])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return made(request.param, eight=False)


@pytest.fixture(scope="module", params=[1, 3])
def eight(request: pytest.FixtureRequest) -> Kernels:
    return made(request.param, eight=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 3), (33, 64), (64, 33), (100, 257), (640, 1536)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_is_the_product_rounded_once(kernels: Kernels, dtype: torch.dtype, n: int, k: int, bias: bool) -> None:
    weight, x, added = torch.randn(n, k).to(dtype), torch.randn(2, 21, k).to(dtype), torch.randn(n) if bias else None
    expected = x.double() @ weight.double().T + (0 if added is None else added.double())
    found = kernels.linear(x, kernels.pack(weight), added)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype] * k**0.5, rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [33, 576, 1536])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("quantised", [False, True])
def test_a_row_of_a_linear_has_the_same_bits_for_every_number_of_rows(
    quantised: bool, threads: int, dtype: torch.dtype, k: int
) -> None:
    kernels = made(threads, eight=quantised)
    weight, x = kernels.pack(torch.randn(200, k).to(dtype)), torch.randn(300, k).to(dtype)
    whole = kernels.linear(x, weight, None)
    for count in (*range(1, 30), 64, 97, 200):
        assert torch.equal(kernels.linear(x[7 : 7 + count], weight, None), whole[7 : 7 + count]), count


# Eight bits


def rounded(x: torch.Tensor) -> torch.Tensor:
    """x [rows, k] as it is after a way through eight bits, 64 numbers to a scale; float64."""
    rows, k = x.shape
    groups = torch.nn.functional.pad(x.float(), (0, -k % 64)).view(rows, -1, 64)
    scales = groups.abs().amax(-1, keepdim=True) / 127
    found = torch.where(scales > 0, (groups * (1 / scales)).round().double() * scales.double(), 0.0)
    return found.view(rows, -1)[:, :k]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 3), (33, 64), (64, 33), (100, 257), (640, 1536)])
def test_a_linear_of_eight_bits_is_the_product_of_what_was_rounded(
    eight: Kernels, dtype: torch.dtype, n: int, k: int
) -> None:
    weight, x, added = torch.randn(n, k).to(dtype), torch.randn(21, k).to(dtype), torch.randn(n)
    x[3], weight[0] = 0, 0
    packed = eight.pack(weight)
    assert packed.eight
    found = eight.linear(x, packed, added)
    assert found.dtype == dtype
    expected = rounded(x) @ rounded(weight).T + added.double()
    # A number midway between two may go either way.
    allowed = TOLERANCE[dtype] * k**0.5 + 2 * x.abs().max() * weight.abs().max() / 127
    torch.testing.assert_close(found.double(), expected, atol=float(allowed), rtol=TOLERANCE[dtype])
    near = (found.double() - expected).abs().mean() / expected.abs().mean()
    assert near < (1e-4 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_a_number_spoils_its_row_of_eight_bits_and_no_other(eight: Kernels, bad: float) -> None:
    x, weight = torch.randn(5, 100), eight.pack(torch.randn(40, 100))
    good = eight.linear(x, weight, None)
    x[2, 70] = bad
    found = eight.linear(x, weight, None)
    assert found[2].isnan().all()
    found[2] = good[2]
    assert torch.equal(found, good)


@pytest.mark.parametrize("size", [1e-42, 1e-33, 1e-20, 1e20, 1e37])
def test_eight_bits_hold_numbers_of_any_size(eight: Kernels, size: float) -> None:
    """What is below a billionth of a billionth of a billionth counts as nothing."""
    found = eight.linear(torch.full((2, 64), size), eight.pack(torch.eye(64)), None)
    assert torch.allclose(found, torch.full((2, 64), size if size > 1e-27 else 0.0), rtol=1e-6, atol=1e-27)


def test_a_weight_may_be_kept_as_it_is_among_others_of_eight_bits(eight: Kernels) -> None:
    weight, x = torch.randn(30, 70), torch.randn(4, 70)
    found = eight.linear(x, eight.pack(weight, whole=True), None)
    torch.testing.assert_close(found, x @ weight.T, atol=2e-4, rtol=2e-5)


def test_what_is_not_a_number_is_not_hidden(kernels: Kernels) -> None:
    weight = kernels.pack(torch.eye(4))
    x = torch.tensor([[1.0, 2.0, 3.0, float("nan")], [1.0, 2.0, 3.0, float("inf")]])
    assert not kernels.linear(x, weight, None).isfinite().any(dim=1).all()
    narrow = kernels.linear(x.bfloat16(), kernels.pack(torch.eye(4).bfloat16()), None)
    assert bool(narrow[0].isnan().any())
    assert bool(narrow[1].isinf().any() | narrow[1].isnan().any())


def test_an_arena_gives_zeros_that_do_not_overlap() -> None:
    arena = Arena()
    places = [(arena.take(size), size) for size in (1, 64, 100, 65 << 20, 7)]
    for address, _ in places:
        assert address % 64 == 0
    ends = sorted((address, address + size) for address, size in places)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))


# How they come to be


def test_the_library_is_compiled_once_and_again_when_a_source_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / build.MAIN).write_text('extern "C" long prelay_lanes() { return 1; }')
    monkeypatch.setattr(build, "HERE", sources)
    first = library(tmp_path, said.append)
    assert library(tmp_path, said.append) == first
    assert len(said) == 1
    (sources / build.MAIN).write_text('extern "C" long prelay_lanes() { return 2; }')
    assert library(tmp_path, said.append) != first
    assert len(said) == 2
    assert sorted(path.name for path in first.parent.iterdir() if path.suffix != ".so") == ["lock"]


def test_without_a_compiler_or_a_place_there_are_none_and_the_reason_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NoKernels, match="cannot write"):
        library(tmp_path / "file", print)
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / build.MAIN).write_text("this is no C++")
    monkeypatch.setattr(build, "HERE", sources)
    with pytest.raises(NoKernels, match=r"failed: .*error"):
        library(tmp_path, print)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NoKernels, match=r"no C\+\+ compiler \(no-such-compiler\)"):
        library(tmp_path, print)
