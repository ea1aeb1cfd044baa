"""How long the contact with Redis has been uninterrupted."""

from __future__ import annotations

import time
from collections.abc import Callable


class Contact:
    """Fed by whoever talks to Redis regularly; a silence counts as an interruption, as when the process was paused."""

    def __init__(self, gap_s: float = 3.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._gap_s = gap_s
        self._clock = clock
        self._since: float | None = None
        self._last = 0.0
        self._server: tuple[int, float] | None = None  # its clock, ms, and when we heard it

    def __repr__(self) -> str:
        return f"Contact(held_ms={self.held_ms})"

    def ok(self) -> None:
        """Redis has answered."""
        now = self._clock()
        if self._since is None or now - self._last > self._gap_s:
            self._since = now
        self._last = now

    def lost(self) -> None:
        """Redis has not answered."""
        self._since = None

    def at_server(self, now_ms: int) -> None:
        """Redis has told its time."""
        self._server = (now_ms, self._clock())

    @property
    def server_ms(self) -> int | None:
        """What the clock of Redis shows by now, at least; None before it told."""
        if self._server is None:
            return None
        told, at = self._server
        return told + int((self._clock() - at) * 1000)

    @property
    def held_ms(self) -> int:
        """Milliseconds of uninterrupted contact up to now; 0 without."""
        now = self._clock()
        if self._since is None or now - self._last > self._gap_s:
            return 0
        return int((now - self._since) * 1000)
