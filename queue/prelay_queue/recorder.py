"""What counts and times things: the side of the metrics that all code sees. What becomes of it: metrics.py.

A recorder never raises and never waits: no metric may change what a process does.
"""

from __future__ import annotations

from typing import Protocol


class Recorder(Protocol):
    """Names are those of metric_table.py; `labels` are the values of the metric's labels, in order."""

    def inc(self, name: str, *labels: str, by: float = 1) -> None:
        """Add to a counter; nothing happens where `by` is not above 0."""
        ...

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Put a value, in seconds, into a histogram."""
        ...


class Nobody:
    """Records nothing."""

    def inc(self, name: str, *labels: str, by: float = 1) -> None: ...

    def observe(self, name: str, value: float, *labels: str) -> None: ...


NOBODY = Nobody()
