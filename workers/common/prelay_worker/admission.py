"""How much more work the claimer may take: published by the model loop, spent by the claim thread."""

from __future__ import annotations

import threading
import time

#: While the model loop is in one step for longer than this nothing is claimed: it could not begin before the step ends,
#: another worker might; and a loop that hangs must not eat job after job.
STEP_S = 1.0


class Admission:
    """Blocks and slots that are free, less what is claimed but has not reached the model loop yet.

    A claim that does not fit is still taken, once: it then waits in the worker as the head and closes admission
    (no put-back dance, so no livelock between workers, and no job is overtaken for ever).
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._changed = threading.Condition()
        self._blocks = 0
        self._slots = 0
        self._inflight: dict[str, int] = {}
        self._closed = True
        self._published = 0.0  # monotonic seconds

    def __repr__(self) -> str:
        return f"Admission(blocks={self._blocks}, slots={self._slots}, inflight={len(self._inflight)}, {self._closed=})"

    def publish(self, blocks: int, slots: int, closed: bool) -> None:
        """The model loop's view: free blocks and slots, and whether a head waits (or we drain)."""
        with self._changed:
            self._blocks, self._slots, self._closed = blocks, slots, closed
            self._published = time.monotonic()
            self._changed.notify_all()

    def wait_open(self, timeout_s: float) -> bool:
        """Wait until one more job may be claimed; False when none may by then. With 0 it only looks."""
        with self._changed:
            return self._changed.wait_for(self._is_open, timeout_s)

    def charge(self, key: str, tokens: int, alone: bool) -> None:
        """A job was claimed. If it does not fit it becomes the head and nothing more is claimed for now."""
        blocks = -(-(tokens + 1) // self._block_size)
        with self._changed:
            self._inflight[key] = blocks
            if alone or sum(self._inflight.values()) > self._blocks:
                self._closed = True

    def settle(self, key: str) -> None:
        """The model loop has the job now."""
        with self._changed:
            self._inflight.pop(key, None)

    def _is_open(self) -> bool:
        if self._closed or len(self._inflight) >= self._slots or time.monotonic() - self._published > STEP_S:
            return False
        return sum(self._inflight.values()) < self._blocks
