"""The fleet at one moment: what waits, what runs, who works, what was given up lately. What `prelay top` shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from redis.exceptions import RedisError

from prelay_queue.client import AsyncQueue, translate
from prelay_queue.history import Restart, read_restarts
from prelay_queue.scripts import text

from .fleet import read_fleet

#: Restarts that are shown, the newest first.
RESTARTS = 20
#: KV domains whose streams are looked at.
MAX_DOMAINS = 64


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits of one class: `stage` is prefill or decode, of all KV domains. `oldest_ms`: since when the first."""

    stage: str
    priority: str
    waiting: int
    oldest_ms: int


async def read_overview(queue: AsyncQueue) -> dict[str, Any]:
    """Everything in three round trips. Raise QueueError."""
    keys = queue.keys
    fleet = await read_fleet(queue)
    try:
        some: Any = await queue.redis.srandmember(keys.domains, MAX_DOMAINS)
        domains = [text(name) for name in some]
        streams = [*keys.work("prefill"), *(stream for name in domains for stream in keys.work(f"decode:{name}"))]
        async with queue.redis.pipeline(transaction=False) as pipe:
            pipe.time()
            pipe.info("memory")
            for index in (keys.queued, keys.leases, keys.preempted, keys.batches):
                pipe.zcard(index)
            pipe.xlen(keys.dead)
            pipe.xrevrange(keys.restarts, count=RESTARTS)
            for stream in streams:
                pipe.xlen(stream)
                pipe.xrange(stream, count=1)
            (seconds, micros), memory, queued, held, preempted, batches, dead, restarts, *rest = await pipe.execute()
    except RedisError as error:
        raise translate(error) from None
    now_ms = int(seconds) * 1000 + int(micros) // 1000
    waits = zip(streams, rest[::2], rest[1::2], strict=True)
    return {
        "now_ms": now_ms,
        "server": {"used_memory": memory["used_memory"], "max_memory": memory.get("maxmemory", 0)},
        "jobs": {"queued": queued, "held": held, "preempted": preempted},
        "batches": batches,
        "dead_letters": dead,
        "queues": [asdict(each) for each in _backlogs(waits, now_ms)],
        "workers": [worker.as_dict() for worker in fleet.workers],
        "restarts": [_restart(each) for each in read_restarts(restarts)],
    }


def _backlogs(waits: Iterable[tuple[str, int, Sequence[Any]]], now_ms: int) -> list[Backlog]:
    """The streams of one stage and class together, in the order in which they are served."""
    found: dict[tuple[str, str], Backlog] = {}
    for stream, length, first in waits:
        stage, priority, _ = stream.partition("}:work:")[2].rsplit(":", 2)
        key = stage.partition(":")[0], priority
        before = found.get(key, Backlog(*key, 0, 0))
        age_ms = max(0, now_ms - int(text(first[0][0]).partition("-")[0])) if first else 0
        found[key] = Backlog(*key, before.waiting + length, max(before.oldest_ms, age_ms))
    return list(found.values())


def _restart(each: Restart) -> dict[str, Any]:
    fields = {name: getattr(each, name) or None for name in ("worker", "why")}
    return {"ms": each.ms, "job": each.job, "epoch": each.epoch, "state": each.state, **fields, "lost": each.lost}
