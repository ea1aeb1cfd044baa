"""Kernels that came compiled with the package, for machines without a compiler: one library for each level of CPU."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from ..cpu import Cpu

#: Filled when a wheel is built (`make wheel`); a checkout has none.
FOLDER = Path(__file__).parent / "shipped"

_X86_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"})
_X86_V4 = _X86_V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@dataclass(frozen=True, slots=True)
class Level:
    """What a compiler is told, and what a CPU must have then, as the kernel names it in /proc/cpuinfo."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]


#: Of each kind of machine, the best first.
_LEVELS = {
    "x86_64": (
        Level(
            "avx512bf16",
            ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
            _X86_V4 | {"avx512_bf16", "avx512_vnni"},
        ),
        Level("avx512", ("-march=x86-64-v4",), _X86_V4),
        Level("avx2", ("-march=x86-64-v3",), _X86_V3),
    ),
    "aarch64": (Level("neon", ("-march=armv8-a",), frozenset({"asimd"})),),
}


def levels() -> tuple[Level, ...]:
    """Those of this kind of machine, the best first; none where the kernels were never compiled."""
    return _LEVELS.get(platform.machine(), ())


def library(cpu: Cpu) -> Path | None:
    """The best library that came along and that `cpu` can run."""
    for level in levels():
        if level.needs <= cpu.flags and (found := sorted(FOLDER.glob(f"kernels-{level.name}-*.so"))):
            return found[-1]
    return None
