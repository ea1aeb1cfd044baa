"""Kernels that come with the package: which of them a CPU gets, and that they compute as those compiled here do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from prelay_engine.cpu import Cpu, this_cpu
from prelay_engine.demo import default_cache
from prelay_engine.native import build, shipped
from prelay_engine.native.build import NoKernels, library, ship
from prelay_engine.native.lib import Kernels

V3 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"])
V4 = V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
NAMES = {"avx2": "kernels-avx2-1.so", "avx512": "kernels-avx512-2.so", "avx512bf16": "kernels-avx512bf16-3.so"}


@pytest.fixture
def came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package for x86 with all levels, on a machine without a compiler."""
    for name in NAMES.values():
        (tmp_path / name).touch()
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setenv("CXX", "no-such-compiler")
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        (V4 | {"avx512_bf16", "avx512_vnni", "amx_bf16"}, "avx512bf16"),
        (V4 | {"avx512_vnni"}, "avx512"),
        (V4 - {"avx512vl"}, "avx2"),
        (V3, "avx2"),
    ],
)
def test_a_cpu_gets_the_best_that_it_can_run(came: Path, flags: frozenset[str], level: str) -> None:
    assert shipped.library(Cpu("", flags)) == came / NAMES[level]


def test_what_did_not_come_along_is_not_there(came: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shipped.library(Cpu("", V3 - {"fma"})) is None
    (came / NAMES["avx2"]).unlink()
    assert shipped.library(Cpu("", V3)) is None
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert shipped.library(Cpu("", V4)) is None


def test_they_are_taken_where_nothing_can_be_compiled(came: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "this_cpu", lambda: Cpu("", V4))
    assert library(came / "cache", print) == came / NAMES["avx512"]
    assert build.expected()
    monkeypatch.setattr(build, "this_cpu", lambda: Cpu("", frozenset()))
    assert not build.expected()
    with pytest.raises(NoKernels, match="no-such-compiler"):
        library(came / "cache", print)


@pytest.mark.slow
def test_each_level_computes_what_the_kernels_compiled_here_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to what a level's own instructions round: bits may differ between levels, and their names do."""
    made = ship(tmp_path)
    assert [path.name.split("-")[1] for path in made] == [level.name for level in shipped.levels()]
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    assert shipped.library(this_cpu()) in made
    own = Kernels(library(default_cache(), print), 2)
    x, weight = torch.randn(13, 200), torch.randn(70, 200)
    for path, level in zip(made, shipped.levels(), strict=True):
        if level.needs <= this_cpu().flags:
            kernels = Kernels(path, 2)
            assert kernels.name != own.name
            for dtype, near in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
                found, expected = (
                    k.linear(x.to(dtype), k.pack(weight.to(dtype)), None).float() for k in (kernels, own)
                )
                torch.testing.assert_close(found, expected, atol=near, rtol=1e-2)
