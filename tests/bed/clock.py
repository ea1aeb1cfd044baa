"""A clock in the hands of a test, in the place of `time.monotonic`."""

from __future__ import annotations


class Clock:
    """Seconds, as a test sets them."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now
