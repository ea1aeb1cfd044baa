"""What may lie in the queue when nobody asks for anything any more."""

from __future__ import annotations

from typing import Any

from prelay_queue.client import SyncQueue
from prelay_queue.scripts import text
from prelay_queue.settings import QueueSettings
from tests.bed.processes import until


def check_no_job_left(settings: QueueSettings) -> None:
    """Wait until no index and no work stream has a job; every job and log that is still there goes by itself."""
    queue = SyncQueue(settings)
    redis, keys = queue.redis, queue.keys

    def live() -> dict[str, int]:
        found: dict[str, Any] = {name: redis.zcard(name) for name in (keys.queued, keys.leases, keys.preempted)}
        streams: Any = redis.keys(f"{keys.prefix}work:*")
        found |= {text(name): redis.xlen(name) for name in streams}
        return {name: count for name, count in found.items() if count}

    try:
        until(lambda: not live())
        kept: Any = [*redis.keys(keys.job("*")), *redis.keys(keys.log("*"))]
        forever = [name for name in kept if redis.pttl(name) < 0]
        assert not forever, forever
    finally:
        queue.close()
