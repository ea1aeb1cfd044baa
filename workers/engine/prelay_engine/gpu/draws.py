"""What rows are drawn with, as the sampling kernel wants it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..sampler import Draw, uniform
from ..shaping import shapes

#: More tokens than any vocabulary has, as an int32.
_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Params:
    """One number a row, in the order of the kernel's arguments; see `sampler.py`."""

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float32]
    point: npt.NDArray[np.float64]

    @staticmethod
    def of(draws: Sequence[Draw]) -> Params:
        settings = [draw.sampling for draw in draws]
        points = [uniform(draw.sampling.seed, draw.seq) if draw.sampling.temperature else 0.0 for draw in draws]
        return Params(
            np.array([each.temperature for each in settings], dtype=np.float32),
            np.array([min(max(0, each.top_k), _MOST) for each in settings], dtype=np.int32),
            np.array([each.top_p for each in settings], dtype=np.float64),
            np.array([each.min_p for each in settings], dtype=np.float32),
            np.array(points, dtype=np.float64),
        )

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        return iter((self.temperature, self.top_k, self.top_p, self.min_p, self.point))


def is_plain(draw: Draw) -> bool:
    """Whether it is drawn from the logits as they are. Others look at ids so far, and are drawn on the host."""
    return not shapes(draw.sampling)
