"""How much more work the claimer may take: published by the model loop, spent by the claim thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import replace

from .policy import EVICTABLE, Opening

#: While the model loop is in one step for longer than this nothing is claimed: it could not begin before the step ends,
#: another worker might; and a loop that hangs must not eat job after job.
STEP_S = 1.0


class Admission:
    """Blocks and slots that are free, less what is claimed but has not reached the model loop yet.

    A claim that does not fit is still taken, once: it then waits in the worker as the head and closes admission
    (no put-back dance, so no livelock between workers, and no job is overtaken for ever). While there is no room, one
    job at a time is taken of those classes for which the loop would make some.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._changed = threading.Condition()
        self._blocks = 0
        self._slots = 0
        self._inflight: dict[str, int] = {}
        self._settled: set[str] = set()
        self._spared_blocks = self._spared_slots = 0
        self._opening = Opening()
        self._published = 0.0  # monotonic seconds

    def __repr__(self) -> str:
        inflight = len(self._inflight)
        return f"Admission(blocks={self._blocks}, slots={self._slots}, inflight={inflight}, {self._opening})"

    def publish(self, blocks: int, slots: int, opening: Opening, spared_blocks: int = 0, spared_slots: int = 0) -> None:
        """The model loop's view: free blocks and slots, and which classes it would take more jobs of.

        Claims of batch jobs leave as many blocks and slots as are spared: a long step is no reason to close for others.
        """
        with self._changed:
            self._blocks, self._slots, self._opening = blocks, slots, opening
            self._spared_blocks, self._spared_slots = spared_blocks, spared_slots
            for key in self._settled:
                self._inflight.pop(key, None)
            self._settled.clear()
            self._published = time.monotonic()
            self._changed.notify_all()

    def wait_open(self, timeout_s: float) -> int:
        """Wait until one more job may be claimed: of how many classes, the most urgent first. 0: of none by then.

        With a time of 0 it only looks.
        """
        with self._changed:
            return self._changed.wait_for(self._classes, timeout_s)

    def wait_wider(self, classes: int, timeout_s: float) -> None:
        """Wait until more than so many classes may be claimed, or the time has passed."""
        with self._changed:
            self._changed.wait_for(lambda: self._classes() > classes, timeout_s)

    def room_for(self, tokens: Iterable[int]) -> int:
        """How many jobs of so many tokens each fit into half of what is free, in this order: others come too."""
        with self._changed:
            blocks, slots = self._free()
            blocks, slots = (blocks - self._spared_blocks) // 2, (slots - self._spared_slots) // 2
        count = 0
        for each in tokens:
            blocks -= self._needs(each)
            if count >= slots or blocks < 0:
                break
            count += 1
        return count

    @property
    def has_room(self) -> bool:
        """Whether one more job may be claimed into free room."""
        with self._changed:
            return self._is_fresh() and self._has_room() and self._opening.room > 0

    @property
    def unserved(self) -> bool:
        """Whether a batch job may be claimed in its turn, while there is room for others only (`policy.Opening`)."""
        with self._changed:
            return self._is_fresh() and self._has_room() and self._opening.unserved

    def charge(self, key: str, tokens: int, alone: bool) -> None:
        """A job was claimed. If it does not fit it becomes the head and nothing more is claimed for now."""
        with self._changed:
            self._inflight[key] = self._needs(tokens)
            if alone or sum(self._inflight.values()) > self._blocks:
                self._opening = Opening()
            self._opening = replace(self._opening, unserved=False)  # it may have been one

    def settle(self, key: str) -> None:
        """The model loop has the job now; what it publishes next is less by that, or says that it waits."""
        with self._changed:
            self._settled.add(key)

    def _needs(self, tokens: int) -> int:
        return -(-(tokens + 1) // self._block_size)

    def _classes(self) -> int:
        if not self._is_fresh():
            return 0
        if self._has_room():
            blocks, slots = self._free()
            spare = blocks > self._spared_blocks and slots > self._spared_slots
            return self._opening.room if spare else min(self._opening.room, EVICTABLE)
        return 0 if self._inflight else self._opening.full

    def _is_fresh(self) -> bool:
        return time.monotonic() - self._published <= STEP_S

    def _has_room(self) -> bool:
        return min(self._free()) > 0

    def _free(self) -> tuple[int, int]:
        """Blocks and slots that are left when all that is claimed has begun."""
        return self._blocks - sum(self._inflight.values()), self._slots - len(self._inflight)
