"""How many tokens prompts and answers have: one number, or a distribution."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..errors import BadUsage

_UNIFORM = re.compile(r"uniform:(\d+)-(\d+)")
_LOGNORMAL = re.compile(r"lognormal:(\d+),(\d*\.?\d+)(?:,(\d+))?")
FORMS = "a number, uniform:LOW-HIGH, or lognormal:MEDIAN,SIGMA[,MAX]"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Draws whole numbers of at least 1. `text` is how it was written."""

    text: str
    _draw: Callable[[np.random.Generator], float]

    def draw(self, rng: np.random.Generator) -> int:
        return max(1, round(self._draw(rng)))

    def __str__(self) -> str:
        return self.text


def parse_lengths(text: str, option: str) -> Lengths:
    """Read one of FORMS. Raise BadUsage, which names the option."""
    text = text.strip()
    if text.isdigit() and int(text) > 0:
        return Lengths(text, lambda _: int(text))
    if (found := _UNIFORM.fullmatch(text)) and 0 < int(found[1]) <= int(found[2]):
        low, high = int(found[1]), int(found[2])
        return Lengths(text, lambda rng: int(rng.integers(low, high, endpoint=True)))
    if (found := _LOGNORMAL.fullmatch(text)) and int(found[1]) > 0:
        mu, sigma, most = math.log(int(found[1])), float(found[2]), float(found[3] or math.inf)
        if most >= 1:
            return Lengths(text, lambda rng: min(most, float(rng.lognormal(mu, sigma))))
    raise BadUsage(f"{option} must be {FORMS}, not {text!r}")
