"""What Redis has of a fleet's jobs."""

from __future__ import annotations

from collections import Counter
from typing import Any

from prelay_queue.scripts import text
from tests.faults.fleet import NullFleet


def jobs(fleet: NullFleet) -> dict[str, dict[str, str]]:
    """All jobs, the ended ones too, with their fields (without prompt and KV reference)."""
    found: dict[str, dict[str, str]] = {}
    for key in fleet.redis.keys(fleet.keys.job("*")):
        fields: Any = fleet.redis.hgetall(key)
        shown = {text(name): text(value) for name, value in fields.items() if name not in (b"spec", b"kv")}
        if "st" in shown:
            found[text(key).rpartition("job:")[2]] = shown
    return found


def running(fleet: NullFleet) -> Counter[str]:
    """The jobs that have not ended, by state."""
    indexes = (fleet.keys.queued, fleet.keys.leases, fleet.keys.preempted)
    names = {text(name) for index in indexes for name in fleet.redis.zrange(index, 0, -1)}
    with fleet.redis.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.hget(fleet.keys.job(name), "st")
        return Counter(text(state) for state in pipe.execute() if state)


def ends(fleet: NullFleet) -> Counter[str]:
    """How the jobs have ended; "" of those that have not."""
    return Counter(job.get("fin", "") for job in jobs(fleet).values())
