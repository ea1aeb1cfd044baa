"""Whether this worker can take KV over at all. One that cannot must not empty the queue of those that can."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger("prelay.decode")

#: Failures in a row, for reasons of this worker's own, after which it steps back.
MOST_IN_ROW = 3
#: For how long it then claims nothing, seconds: doubled by every trial that fails, up to the most.
FIRST_PAUSE_S, MOST_PAUSE_S = 1.0, 30.0


class Reach:
    """Counts hand-overs that failed because of this worker, whichever job it was. For one thread.

    A worker that fails is always free, so it would be the first to claim each job again, until the job has failed too
    often. After some failures in a row it pauses, and then tries one job at a time until one succeeds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._in_row = 0
        self._pause_s = FIRST_PAUSE_S
        self._until = 0.0  # clock seconds

    def __repr__(self) -> str:
        return f"Reach({self._in_row} failed in a row)"

    def worked(self) -> None:
        if self.stands_back:
            log.info("KV can be taken over again")
        self._in_row, self._pause_s, self._until = 0, FIRST_PAUSE_S, 0.0

    def failed(self, why: Exception) -> None:
        self._in_row += 1
        now = self._clock()
        if self._in_row < MOST_IN_ROW or now < self._until:  # one of several that were under way
            return
        words = "KV could not be taken over %d times in a row, claims nothing for %.0f s: %s"
        log.error(words, self._in_row, self._pause_s, why)
        self._until = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, MOST_PAUSE_S)

    @property
    def stands_back(self) -> bool:
        """Whether one job at a time is enough to try."""
        return self._in_row >= MOST_IN_ROW

    @property
    def pauses(self) -> bool:
        """Whether nothing is to be tried now."""
        return self._clock() < self._until
