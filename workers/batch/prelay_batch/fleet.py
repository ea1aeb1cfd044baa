"""What the workers can hold, as a runner knows it: it decides whether a line can ever be served."""

from __future__ import annotations

import logging
import time
from typing import Any

from redis.exceptions import RedisError

from prelay_queue.client import SyncQueue
from prelay_queue.scripts import text
from prelay_text.fleet import Fleet, fleet_of
from prelay_text.resolve import Limits

log = logging.getLogger("prelay.batch")

#: The fleet is looked up this often, seconds.
REFRESH_S = 2.0


class FleetLimits:
    """The limits of the fleet, looked up when they are asked for and were not lately.

    Those of a fleet that is away stay known.
    """

    def __init__(self, queue: SyncQueue, context_len: int) -> None:
        self._queue, self._context_len = queue, context_len
        self._known = Limits(context_len)
        self._look_at = 0.0

    def __call__(self) -> Limits:
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + REFRESH_S
            self._look()
        return self._known

    def _look(self) -> None:
        try:
            fleet = read_fleet(self._queue)
        except RedisError as error:
            log.info("cannot read the fleet: %s", error)
            return
        if fleet.workers:
            self._known = fleet.limits(self._context_len)


def read_fleet(queue: SyncQueue) -> Fleet:
    """All heartbeats. Raise RedisError."""
    keys = queue.keys
    names = [text(name) for name in queue.redis.zrange(keys.workers, 0, -1)]
    with queue.redis.pipeline(transaction=False) as pipe:
        pipe.time()
        for name in names:
            pipe.get(keys.worker(name))
        answers: list[Any] = pipe.execute()
    (seconds, micros), *beats = answers
    return fleet_of(beats, int(seconds) * 1000 + int(micros) // 1000)
