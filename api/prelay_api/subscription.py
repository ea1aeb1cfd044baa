"""What the hub has for one job that is relayed here."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from prelay_queue.events import LiveEvent

from .relay import Relay

#: Live events of one job that may wait; beyond it the log is read instead.
MAX_WAITING = 512


class Subscription:
    """A small queue of live events between the hub's reader and the driver of one relay."""

    def __init__(self, job: str, relay: Relay) -> None:
        self.job = job
        self.relay = relay
        self.busy = False  # the driver waits for Redis: it will know better in a moment
        self.looked = time.monotonic()  # when the relay last learnt something
        self._events: deque[LiveEvent] = deque()
        self._reread = False
        self._wake = asyncio.Event()

    def __repr__(self) -> str:
        return f"Subscription({self.job!r}, waiting={len(self._events)}, {self.relay!r})"

    def put(self, event: LiveEvent) -> None:
        """An event came. Nothing waits without bound: too many are replaced by a look at the log."""
        if len(self._events) >= MAX_WAITING:
            self._events.clear()
            self._reread = True
        else:
            self._events.append(event)
        self._wake.set()

    def want_log(self) -> None:
        """Events may have been lost: the driver is to read the log."""
        self._reread = True
        self._wake.set()

    async def wait(self) -> tuple[list[LiveEvent], bool]:
        """Wait for events, or for a wish to read the log; return both. A cancelled wait takes nothing."""
        await self._wake.wait()
        events, reread = list(self._events), self._reread
        self._events.clear()
        self._reread = False
        self._wake.clear()
        return events, reread

    def knows(self, state: str, epoch: int, emitted: int) -> bool:
        """Is that where the relay believes the job to be?"""
        relay = self.relay
        settled = state not in ("done", "preempted")
        return relay.end is not None or (settled and epoch == relay.epoch and emitted == relay.standing)
