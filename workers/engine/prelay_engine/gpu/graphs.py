"""Decode steps that are captured once and replayed: which batch sizes have a CUDA graph, and what runs without."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

from ..errors import CaptureError, OutOfMemory
from .buckets import Buckets

log = logging.getLogger("prelay.engine")

#: Computes the first so many rows of the static buffers, and leaves the result there.
Run = Callable[[int], None]


class Capture(Protocol):
    """Makes CUDA graphs. `capture.TorchCapture` is the real one."""

    def capture(self, rows: int, run: Callable[[], None]) -> Callable[[], None]:
        """Call `run`, which computes `rows` rows, as often as need be, and return what does the same on the device.

        `run` reads and writes memory that stays where it is, and does not wait for the device. What it computes must
        not matter: it runs more than once. Raises OutOfMemory, or CaptureError where no size can be captured; what
        this capture took is free again then, once the graphs captured before it are gone.
        """


class GraphRunner:
    """The graphs of one model's decode steps, by bucket. For one thread, and one stream of the device.

    Graphs share memory for what they compute in between: none may run beside another.
    """

    def __init__(self, buckets: Buckets, capture: Capture) -> None:
        self.buckets = buckets
        self._capture = capture
        self._graphs: dict[int, Callable[[], None]] = {}
        self._why = "not captured yet"  # what has no graph has none
        #: Steps since the start, by how they ran.
        self.replayed = 0
        self.eager = 0

    def capture_all(self, run: Run) -> None:
        """Capture `run` for each bucket, the largest first, so that the others find room in what it took.

        The buffers must hold no live rows: see `DecodeBuffers.clear`. Where memory runs out, that bucket and all
        larger ones, those captured before it, go without a graph, and leave the others what they took.
        """
        self._graphs.clear()
        self._why = "not captured"
        for rows in reversed(self.buckets.sizes):
            try:
                self._graphs[rows] = self._capture.capture(rows, partial(run, rows))
            except OutOfMemory as error:
                self._graphs.clear()
                self._why = str(error)
            except CaptureError as error:
                self._graphs.clear()
                self._why = str(error)
                break
        if len(self._graphs) < len(self.buckets.sizes):
            log.warning("CUDA graphs: %s", self.state)

    def fit(self, rows: int) -> int | None:
        """The bucket in which a step of so many rows is replayed; None if it runs without a graph."""
        bucket = self.buckets.fit(rows)
        return bucket if bucket in self._graphs else None

    def compute(self, rows: int, run: Run) -> int:
        """Compute the first `rows` rows of the buffers: replay their bucket, or call `run`. Returns how many ran.

        Those beyond `rows` are padding. An exception leaves the buffers in any state; the next fill sets them right.
        """
        bucket = self.fit(rows)
        if bucket is None:
            self.eager += 1
            run(rows)
            return rows
        self.replayed += 1
        self._graphs[bucket]()
        return bucket

    @property
    def state(self) -> str:
        """Which sizes were captured, and why others were not, in words."""
        captured = [size for size in self.buckets.sizes if size in self._graphs]
        without = [size for size in self.buckets.sizes if size not in self._graphs]
        parts = [f"{_range(captured)} captured"] if captured else []
        parts += [f"{_range(without)} run without ({self._why})"] if without else []
        return ", ".join(parts)

    def __repr__(self) -> str:
        return f"<GraphRunner {self.state}; {self.replayed} replayed, {self.eager} eager>"


def _range(sizes: list[int]) -> str:
    return f"{sizes[0]} rows" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} rows"
