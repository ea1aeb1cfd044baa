"""When requests of an open loop are sent."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def arrivals(
    rate: float,
    burstiness: float,
    rng: np.random.Generator,
    *,
    count: int | None = None,
    duration_s: float | None = None,
) -> list[float]:
    """Seconds after the start, rising: `count` of them, or all that fall within `duration_s`.

    The gaps are gamma-distributed with mean 1/rate and shape `burstiness`: 1 is a Poisson process, less comes in
    bursts, more is more even.
    """
    assert (count is None) != (duration_s is None)
    if count is not None:
        return [float(at) for at in np.cumsum(_gaps(rate, burstiness, rng, count))]
    times: list[float] = []
    at = 0.0
    while (at := at + float(_gaps(rate, burstiness, rng, 1)[0])) < float(duration_s or 0):
        times.append(at)
    return times


def _gaps(rate: float, burstiness: float, rng: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
    return rng.gamma(burstiness, 1 / (rate * burstiness), count)
