"""What a fleet at rest may hold: no block, no open job, and no key that stays."""

from __future__ import annotations

from typing import Any

import redis

#: What PTTL answers for a key that stays.
NO_END = -1


def is_accounted(kv: dict[str, int]) -> bool:
    """Is each block of a pool, as a heartbeat tells of it, in exactly one state, and owned by somebody who lives?"""
    states = kv["free"] + kv["copying"] + kv["leased"] + kv["cached"]
    return states == kv["total"] and min(kv.values()) >= 0 and kv["orphaned"] == 0


def is_whole(kv: dict[str, int]) -> bool:
    """Does nobody hold a block of this pool?"""
    return kv["free"] + kv["cached"] == kv["total"]


def left_in(client: redis.Redis) -> list[str]:
    """Keys that may not be there when no job runs, whatever processes do: indexes, work entries, what never expires."""
    return [name for name in map(_text, client.keys("prelay:*")) if not _may_be(client, name)]


def _may_be(client: redis.Redis, name: str) -> bool:
    kind, _, _ = name.partition("}:")[2].partition(":")
    if kind == "work":
        pending: list[Any] = client.xinfo_groups(name)
        return client.xlen(name) == 0 and all(group["pending"] == 0 for group in pending)
    if kind in ("job", "log"):
        return bool(client.pttl(name) != NO_END)
    return kind not in ("queued", "leases", "preempted")


def _text(raw: Any) -> str:
    return raw.decode() if isinstance(raw, bytes) else str(raw)
