"""From requests to figures: percentiles, rates, and how many requests met their targets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import BadUsage

QUANTILES = (50, 90, 99)
#: What `quantiles` gives.
STATISTICS = ("mean", *(f"p{q}" for q in QUANTILES))


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as its client saw it. Times in seconds, `start` after the start of its level.

    `why` says what went wrong and is empty for a request that ended well; of others no figure but the count is used.
    `gaps` are the times between frames with text.
    """

    start: float
    why: str = ""
    ttft: float = 0.0
    e2e: float = 0.0
    tokens_in: int = 0
    tokens_out: int = 0
    tokens_cached: int = 0  # of those in: the server says that it had them already
    gaps: Sequence[float] = ()
    counted_by_frames: bool = False  # the server told no usage

    @property
    def ok(self) -> bool:
        return not self.why

    @property
    def tpot(self) -> float | None:
        """(t_last - t_first) / (n - 1); None for an answer of one token."""
        return (self.e2e - self.ttft) / (self.tokens_out - 1) if self.tokens_out > 1 else None


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets that a request must meet together, in milliseconds."""

    targets: dict[str, float] = field(default_factory=dict)

    def met(self, sample: Sample) -> bool:
        """A failed request misses; an answer of one token has no TPOT to miss."""
        found = {"ttft": sample.ttft, "tpot": sample.tpot or 0.0, "e2e": sample.e2e}
        return sample.ok and all(found[name] * 1000 <= limit for name, limit in self.targets.items())

    def attainment(self, samples: Sequence[Sample]) -> float:
        """Share of the requests that met all targets; 0 without requests."""
        return sum(map(self.met, samples)) / len(samples) if samples else 0.0


def parse_slo(text: str) -> Slo:
    """Read "ttft=500,tpot=50" (milliseconds; e2e too). Raise BadUsage."""
    targets: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        try:
            targets[name] = float(value)
        except ValueError:
            targets[name] = 0.0
        if name not in ("ttft", "tpot", "e2e") or not targets[name] > 0:
            raise BadUsage(f"--slo must be like ttft=500,tpot=50 (ttft, tpot, e2e; milliseconds), not {text!r}")
    return Slo(targets)


def quantiles(values: Iterable[float], scale: float = 1000.0) -> dict[str, float] | None:
    """Mean and percentiles (linear between neighbours) of seconds, in milliseconds; None where there are none."""
    found = np.fromiter(values, dtype=np.float64) * scale
    if not len(found):
        return None
    figures = {"mean": found.mean(), **{f"p{q}": np.percentile(found, q) for q in QUANTILES}}
    return {name: round(float(value), 3) for name, value in figures.items()}


def summary(samples: Sequence[Sample], wall_s: float, slo: Slo | None) -> dict[str, Any]:
    """Everything that is reported of one level. `wall_s` is from its start to its last answer's end."""
    good = [sample for sample in samples if sample.ok]
    tokens_in, tokens_out = sum(s.tokens_in for s in good), sum(s.tokens_out for s in good)
    wall = max(wall_s, 1e-9)
    figures: dict[str, Any] = {
        "requests": len(samples),
        "ok": len(good),
        "failed": len(samples) - len(good),
        "failures": dict(Counter(sample.why for sample in samples if not sample.ok).most_common()),
        "wall_s": round(wall_s, 3),
        "requests_per_s": round(len(good) / wall, 3),
        "tokens_in": tokens_in,
        "tokens_out": tokens_out,
        "tokens_cached": sum(sample.tokens_cached for sample in good),
        "tokens_in_per_s": round(tokens_in / wall, 1),
        "tokens_out_per_s": round(tokens_out / wall, 1),
        "ttft_ms": quantiles(sample.ttft for sample in good),
        "tpot_ms": quantiles(sample.tpot for sample in good if sample.tpot is not None),
        "itl_ms": quantiles(gap for sample in good for gap in sample.gaps),
        "e2e_ms": quantiles(sample.e2e for sample in good),
        "tokens_from": "frames" if any(sample.counted_by_frames for sample in good) else "usage",
    }
    if slo is not None:
        figures["attainment"] = round(slo.attainment(samples), 4)
    return figures
