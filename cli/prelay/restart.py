"""When a dead child is started again. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass

#: First wait before a restart, in seconds; doubled by each failure in a row.
FIRST_DELAY_S = 0.2
#: Longest wait, in seconds.
LONGEST_DELAY_S = 30.0
#: A child that lived so long was healthy: its earlier failures are forgotten. Seconds.
HEALTHY_S = 60.0
#: A death before this age is a fast failure, in seconds. A job that kills its worker is given up by the queue
#: after four crashes at most, so slower deaths never end the service.
FAST_S = 10.0
#: More fast failures in a row than this, and the supervisor gives up.
FAST_FAILURES_MAX = 8


@dataclass(frozen=True, slots=True)
class Again:
    """Start it again after so many seconds."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """It will not get better by itself."""

    why: str


class RestartPolicy:
    """The history of one child."""

    def __init__(self) -> None:
        self.failures = 0
        self.fast_failures = 0

    def __repr__(self) -> str:
        return f"RestartPolicy(failures={self.failures}, fast_failures={self.fast_failures})"

    def on_exit(self, lived_s: float, code: int, started_up: bool) -> Again | GiveUp:
        """Decide after a death that nobody asked for. `code` is negative for a signal.

        `started_up` is whether the whole service has been ready before: until then a child that says by itself
        that it cannot run (a broken model, a bad option) is believed at once.
        """
        if code > 0 and (code == 2 or not started_up):
            return GiveUp(f"cannot run ({describe(code)})")
        if lived_s >= HEALTHY_S:
            self.failures = self.fast_failures = 0
        self.failures += 1
        self.fast_failures = self.fast_failures + 1 if lived_s < FAST_S else 0
        if self.fast_failures > FAST_FAILURES_MAX:
            return GiveUp(f"failed {self.fast_failures} times in a row, last with {describe(code)}")
        return Again(min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (self.failures - 1)))


def describe(code: int) -> str:
    """Return an exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
