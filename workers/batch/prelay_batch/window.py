"""How much of a batch stands in the queue: enough that capacity which falls free is used, and no more than that."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Jobs that may wait for a prefill however slowly the fleet begins them.
LEAST_WAITING = 8
#: Over how long what the fleet begins is averaged, seconds.
MEMORY_S = 1.0


@dataclass(frozen=True, slots=True)
class Backlog:
    """Jobs of the batch class, of whomever: how many wait for a prefill, and how many were ever put there."""

    waiting: int
    added: int

    @property
    def begun(self) -> int:
        return self.added - self.waiting


class Window:
    """Says how many jobs to submit. Pure: told what the queue holds, and the time.

    What waits is limited to what the fleet has lately begun in a second: so a batch finds its place in what others
    leave, and gives way within a second. What is submitted and not over, waiting or running, is limited to `most`.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._per_s = 0.0
        self._seen: tuple[Backlog, float] | None = None

    def __repr__(self) -> str:
        return f"Window(most={self._most}, per_s={self._per_s:.0f})"

    @property
    def may_wait(self) -> int:
        """Jobs of the class that may wait now."""
        return max(LEAST_WAITING, int(self._per_s))

    def see(self, backlog: Backlog, now: float) -> None:
        """Take in what the queue holds at the time `now`, seconds."""
        if self._seen is not None:
            before, at = self._seen
            if now <= at:
                return
            begun = max(0, backlog.begun - before.begun)  # fewer: Redis lost its streams
            share = -math.expm1((at - now) / MEMORY_S)
            self._per_s += share * (begun / (now - at) - self._per_s)
        self._seen = backlog, now

    def room(self, outstanding: int, waiting: int) -> int:
        """How many more jobs to submit, when so many of ours are not over and so many of all wait."""
        return max(0, min(self._most - outstanding, self.may_wait - waiting))
