"""The metrics of one process, made at its start: recorded here, and shown as Prometheus reads them.

Alone, a process keeps its values in memory and shows its own. Under `prelay serve` all processes keep theirs in files
of one folder, and whichever API process is asked shows the sums. A file belongs to a place in the fleet ("decode-0"),
not to a pid: whoever is started anew in that place goes on from the values there, so no sum ever goes back.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from pathlib import Path
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
    values,
)
from prometheus_client.multiprocess import MultiProcessCollector

from .metric_table import OTHER, TABLE, Kind, Metric, Part

log = logging.getLogger("prelay.metrics")

#: Names the folder that the processes of one `prelay serve` share.
FOLDER = "PROMETHEUS_MULTIPROC_DIR"
#: Names the place of this process in the fleet.
PLACE = "PRELAY_METRICS_PLACE"

#: Room of the files, bytes. They are allocated whole: writing to a mapped file on a full disk would kill the process.
_ROOM = {"counter": 1 << 17, "histogram": 1 << 19, "gauge_sum": 1 << 16}


class Metrics:
    """Counters and histograms of TABLE, for some of its parts. Safe to use from all threads; nothing here raises."""

    def __init__(self, *parts: Part) -> None:
        self.folder = _join()
        self._registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._made = {m.name: _make(m, self._registry) for m in TABLE.values() if m.part in parts}
        self._children: dict[tuple[str, ...], Any] = {}
        for name in self._made:
            self._prepare(TABLE[name])

    def _prepare(self, metric: Metric) -> None:
        """A counter is there from the start, at 0: the first thing that it counts shows as an increase."""
        if metric.kind is Kind.COUNTER:
            for labels in itertools.product(*metric.labels.values()):
                self._child(metric.name, labels)
        elif metric.kind is Kind.GAUGE:
            self._child(metric.name, ()).set(0)  # whoever had this place before may have left a value

    def _child(self, name: str, labels: tuple[str, ...]) -> Any:
        found = self._children.get((name, *labels))
        if found is None:
            known = TABLE[name].labels.values()
            fitting = (v if not allowed or v in allowed else OTHER for v, allowed in zip(labels, known, strict=True))
            with self._lock:
                found = self._made[name].labels(*fitting) if labels else self._made[name]
                self._children[(name, *labels)] = found
        return found

    def inc(self, name: str, *labels: str, by: float = 1) -> None:
        """Add to a counter; nothing happens where `by` is not above 0."""
        try:
            if by > 0:
                self._child(name, labels).inc(by)
        except Exception as error:  # the work goes on, whatever is the matter with its figures
            log.debug("%s: %s", name, error)

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Put a value into a histogram. A negative one, of clocks that differ, counts as 0."""
        try:
            self._child(name, labels).observe(max(0.0, value))
        except Exception as error:
            log.debug("%s: %s", name, error)

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        try:
            self._child(name, ()).set(value)
        except Exception as error:
            log.debug("%s: %s", name, error)

    @property
    def registry(self) -> CollectorRegistry:
        """All of it: of the whole fleet where its processes share a folder."""
        if self.folder is None:
            return self._registry
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=str(self.folder))
        return registry

    def text(self) -> bytes:
        """The registry in Prometheus's text format 0.0.4."""
        return generate_latest(self.registry)


def _make(metric: Metric, registry: CollectorRegistry) -> Any:
    names = tuple(metric.labels)
    match metric.kind:
        case Kind.COUNTER:
            return Counter(metric.name, metric.help, names, registry=registry)
        case Kind.HISTOGRAM:
            return Histogram(metric.name, metric.help, names, registry=registry, buckets=metric.buckets)
        case Kind.GAUGE:
            return Gauge(metric.name, metric.help, names, registry=registry, multiprocess_mode="sum")


def _join() -> Path | None:
    """Keep the values of this process in the folder of the fleet, if there is one. Return it."""
    disable_created_metrics()
    folder = os.environ.get(FOLDER)
    if not folder:
        return None
    place = os.environ.get(PLACE) or str(os.getpid())
    try:
        for kind, room in _ROOM.items():
            _allocate(Path(folder) / f"{kind}_{place}.db", room)
    except OSError as error:
        log.warning("metrics of this process are not shown: %s: %s", folder, error.strerror)
        values.ValueClass = values.MutexValue
        return None
    values.ValueClass = values.MultiProcessValue(lambda: place)
    return Path(folder)


def _allocate(path: Path, room: int) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, room)
    finally:
        os.close(descriptor)
