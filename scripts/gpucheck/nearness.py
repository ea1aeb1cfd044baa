"""How near results of a type are to exact arithmetic."""

from __future__ import annotations

import math

import torch

from .found import need

#: The most by which a row may be off, as a share of its length: some roundings of the type, none of another kind.
_MOST = {torch.float32: 5e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The greatest over the rows of |found - expected| / |expected|, over the last dimension; NaN is infinitely far."""
    off = (found.double() - expected.double()).norm(dim=-1)
    share = off / expected.double().norm(dim=-1).clamp(min=1e-30)
    worst = float(share.max()) if share.numel() else 0.0
    return math.inf if math.isnan(worst) else worst


class Worst:
    """The farthest of all results of a type so far."""

    def __init__(self) -> None:
        self._worst: dict[torch.dtype, float] = {}
        self._count = 0

    def near(self, found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        """Wrong when `found` is not as near as its type is."""
        dtype, off = found.dtype, distance(found, expected)
        need(found.shape == expected.shape, f"{what}: it is {tuple(found.shape)}, not {tuple(expected.shape)}")
        need(off <= _MOST[dtype], f"{what}: off by {off:.2g} of its length, {_MOST[dtype]:g} is rounding")
        self._worst[dtype] = max(self._worst.get(dtype, 0.0), off)
        self._count += 1

    def __str__(self) -> str:
        each = ", ".join(f"{str(dtype).removeprefix('torch.')} {off:.1g}" for dtype, off in self._worst.items())
        return f"{self._count} cases, off by at most {each}"


def same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Wrong unless they have the same bits, and are numbers."""
    need(bool(torch.isfinite(expected).all()), f"{what}: there is a NaN")
    differ = int((found != expected).sum()) if found.shape == expected.shape else -1
    need(differ == 0, f"{what}: {differ} of {expected.numel()} numbers differ")
