"""How fast a batch goes, and when it will be over."""

from __future__ import annotations

from collections import deque

from .batch import Batch

#: What counts is the last of it, seconds.
WINDOW_S = 30.0


class Rate:
    """Looks at a batch now and then. No clock of its own."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Batch]] = deque()

    def see(self, now: float, batch: Batch) -> None:
        """Take a look at `now`, in seconds."""
        if self._seen and batch.ended < self._seen[-1][1].ended:
            self._seen.clear()  # the server lost data: what came before says nothing
        self._seen.append((now, batch))
        while len(self._seen) > 2 and self._seen[1][0] <= now - WINDOW_S:
            self._seen.popleft()

    @property
    def has_begun(self) -> bool:
        """Whether any line has ended."""
        return bool(self._seen) and self._seen[-1][1].ended > 0

    def tokens_per_s(self) -> float | None:
        """None where the server does not count them, or nothing is known yet."""
        span, first, last = self._span()
        if first is None or last is None or first.tokens is None or last.tokens is None:
            return None
        return (last.tokens - first.tokens) / span if span else None

    def lines_per_s(self) -> float | None:
        span, first, last = self._span()
        return (last.ended - first.ended) / span if first and last and span else None

    def left_s(self) -> float | None:
        """Seconds until all lines have ended, at this speed; None where that is not known."""
        rate, batch = self.lines_per_s(), self._seen[-1][1] if self._seen else None
        if batch is None or not rate or not batch.total:
            return None
        return max(0.0, (batch.total - batch.ended) / rate)

    def _span(self) -> tuple[float, Batch | None, Batch | None]:
        if len(self._seen) < 2:
            return 0.0, None, None
        (begun, first), (now, last) = self._seen[0], self._seen[-1]
        return now - begun, first, last
