"""The highest rate at which enough requests meet their targets, found by trying rates."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: DistServe's: the share of requests that must meet all targets.
ATTAINMENT = 0.9
#: The search goes no further up, or down, from where it began than by these factors.
_UP, _DOWN = 1024, 64


@dataclass
class Search:
    """Doubles (or halves) `rate` until the answer lies between two tried rates, then halves what lies between.

    Try `rate` until `done`, and `tell` the result each time. The goodput is `low`: the highest rate that was tried
    and met, 0 when none was. Attainment is taken to fall as the rate rises.
    """

    rate: float
    tolerance: float = 0.05  # of the rate: the two sides come as close as this
    low: float = 0.0
    high: float = math.inf

    def __post_init__(self) -> None:
        self._begin = self.rate

    @property
    def done(self) -> bool:
        if math.isinf(self.high):
            return self.low >= self._begin * _UP
        if not self.low:
            return self.high <= self._begin / _DOWN
        return self.high <= self.low * (1 + self.tolerance)

    @property
    def bounded(self) -> bool:
        """Whether a rate was found that is too much."""
        return not math.isinf(self.high)

    def tell(self, met: bool) -> None:
        if met:
            self.low = self.rate
        else:
            self.high = self.rate
        if math.isinf(self.high):
            self.rate = self.low * 2
        elif not self.low:
            self.rate = self.high / 2
        else:
            self.rate = (self.low + self.high) / 2
