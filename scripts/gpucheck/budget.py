"""How long each part may take. Pure: it is told the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .catalogue import Check, Part

#: A check that takes so many times what it should hangs, and is ended; starting a process comes on top.
_PATIENCE, _START_S = 3.0, 60.0


@dataclass(frozen=True, slots=True)
class Budget:
    """All moments are in seconds of one clock."""

    ends: float

    def part_ends(self, now: float, part: Part, later: Sequence[Part]) -> float:
        """When `part`, which begins now, should be done: what it does not take is left to those `later`."""
        shares = part.share + sum(each.share for each in later)
        return now + max(0.0, self.ends - now) * part.share / shares

    def refusal(self, now: float, check: Check, part_ends: float) -> str:
        """Why a check is not begun now; empty if it may."""
        left = part_ends - now
        if left >= check.takes_s:
            return ""
        return f"takes about {check.takes_s} s, and {max(0.0, left):.0f} s are left for {check.part}"

    def limit_s(self, now: float, check: Check) -> float:
        """After so many seconds a check that begins now is ended."""
        return max(1.0, min(_PATIENCE * check.takes_s + _START_S, self.ends - now))
