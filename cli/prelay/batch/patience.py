"""How a server that does not answer is waited for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from ..errors import CliError

#: Between two tries, seconds: the first wait, which doubles, and the longest.
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 5.0
#: The longest wait that a server may ask for, seconds.
LONGEST_RETRY_AFTER_S = 60.0


class Patience:
    """Says once that a server is waited for, and once that it is back."""

    def __init__(
        self,
        where: str,
        say: Callable[[str], None],
        limit_s: float = math.inf,
        check: Callable[[], None] = lambda: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`check` is called before each wait; what it raises ends the waiting."""
        self.has_answered = False
        self._where, self._say, self._limit_s, self._check, self._sleep = where, say, limit_s, check, sleep
        self._lost_at: float | None = None
        self._tries = 0

    def heard(self) -> None:
        """It answered."""
        if self._lost_at is not None:
            self._say(f"{self._where} answers again after {time.monotonic() - self._lost_at:.0f} s")
        self.has_answered, self._lost_at, self._tries = True, None, 0

    def lost(self, why: str, retry_after_s: float = 0.0) -> None:
        """It did not answer, or said not now: wait. Raise CliError when it was waited for long enough."""
        self._check()
        now = time.monotonic()
        if self._lost_at is None:
            self._lost_at = now
            if self._limit_s:
                self._say(f"{self._where} does not serve now ({why}): waiting for it")
        if now - self._lost_at >= self._limit_s:
            raise CliError(f"{self._where} does not serve: {why}")
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(self._tries, 10))
        self._tries += 1
        self._sleep(max(wait_s, min(retry_after_s, LONGEST_RETRY_AFTER_S)))
