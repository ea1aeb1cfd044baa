"""Tokens a second of each worker, from two looks at its heartbeat. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class Rates:
    """Remembers the last heartbeat of each worker; one that has not beaten since keeps its rate."""

    def __init__(self) -> None:
        self._beats: dict[str, tuple[int, int]] = {}  # worker -> (server ms, tokens computed by then)
        self._rates: dict[str, float] = {}

    def look(self, workers: Sequence[Mapping[str, Any]]) -> None:
        """Note the heartbeats of one moment. Those of workers that are gone are forgotten."""
        for worker in workers:
            name, now = worker["id"], (int(worker["t"]), int(worker.get("computed_tokens", 0)))
            before = self._beats.get(name)
            if before is not None and now[0] > before[0]:
                self._rates[name] = max(0, now[1] - before[1]) * 1000 / (now[0] - before[0])
            self._beats[name] = now
        here = {worker["id"] for worker in workers}
        self._beats = {name: beat for name, beat in self._beats.items() if name in here}
        self._rates = {name: rate for name, rate in self._rates.items() if name in here}

    def of(self, worker: str) -> float | None:
        """None until two heartbeats were seen."""
        return self._rates.get(worker)

    def total(self, workers: Sequence[Mapping[str, Any]], *roles: str) -> float:
        return sum(self._rates.get(worker["id"], 0.0) for worker in workers if worker["role"] in roles)
