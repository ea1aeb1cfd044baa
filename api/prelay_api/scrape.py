"""What stands in Redis now, as metrics: queues, workers, pools, batches. Read while /metrics answers.

Every read is bounded: lengths and first entries of streams, the heartbeats, and the oldest batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from redis.exceptions import RedisError

from prelay_queue import __version__
from prelay_queue.client import AsyncQueue, translate
from prelay_queue.job import Priority
from prelay_queue.keys import Keys
from prelay_queue.metric_table import TABLE, Kind, Part
from prelay_queue.scripts import text
from prelay_text.fleet import Fleet, Worker

from .fleet import read_fleet

#: KV domains whose streams are looked at.
MAX_DOMAINS = 32
#: Open batches whose progress is looked at, the oldest first.
MAX_BATCHES = 100

Samples = list[tuple[tuple[str, ...], float]]


@dataclass(slots=True)
class Figures:
    """Samples by metric: label values and a value each."""

    samples: dict[str, Samples] = field(default_factory=dict)

    def add(self, name: str, value: float, *labels: str) -> None:
        self.samples.setdefault(name, []).append((labels, value))


async def read_figures(queue: AsyncQueue) -> Figures:
    """What Redis and the heartbeats say. Raise QueueError."""
    figures = Figures()
    fleet = await read_fleet(queue)
    try:
        await _read_queues(queue, figures)
    except RedisError as error:
        raise translate(error) from None
    _add_workers(fleet, figures)
    return figures


def render(figures: Figures | None, fleet: str) -> bytes:
    """In Prometheus's text format 0.0.4. None: Redis did not answer."""
    found = figures or Figures()
    found.add("prelay_build_info", 1, __version__, fleet)
    found.add("prelay_redis_up", 0 if figures is None else 1)
    registry = CollectorRegistry()
    registry.register(_Once(found))
    return generate_latest(registry)


class _Once(Collector):
    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        for metric in TABLE.values():
            if metric.part is Part.SCRAPE and metric.name in self._figures.samples:
                assert metric.kind is Kind.GAUGE
                family = GaugeMetricFamily(metric.name, metric.help, labels=list(metric.labels))
                for labels, value in self._figures.samples[metric.name]:
                    family.add_metric(labels, value)
                yield family


async def _read_queues(queue: AsyncQueue, figures: Figures) -> None:
    keys = queue.keys
    async with queue.redis.pipeline(transaction=False) as pipe:
        pipe.srandmember(keys.domains, MAX_DOMAINS)
        pipe.zrange(keys.batches, 0, MAX_BATCHES - 1)
        domains, batches = await pipe.execute()
    streams = _streams(keys, [text(name) for name in domains])
    async with queue.redis.pipeline(transaction=False) as pipe:
        pipe.time()
        pipe.info("memory")
        pipe.execute_command("HMGET", keys.waiting, *(f"#tokens:{cls}" for cls in Priority))
        for index in (keys.queued, keys.leases, keys.preempted, keys.batches):
            pipe.zcard(index)
        pipe.xlen(keys.dead)
        for batch in batches:
            pipe.hmget(keys.batch(text(batch)), "lease", "total", "done", "failed")
        for _, _, stream in streams:
            pipe.xlen(stream)
            pipe.xrange(stream, count=1)
        found: list[Any] = await pipe.execute()
    (seconds, micros), memory, tokens, queued, held, preempted, open_batches, dead, *rest = found
    now_ms = int(seconds) * 1000 + int(micros) // 1000
    figures.add("prelay_redis_memory_used_bytes", memory["used_memory"])
    figures.add("prelay_redis_memory_limit_bytes", memory.get("maxmemory", 0))
    for cls, count in zip(Priority, tokens, strict=True):
        figures.add("prelay_queue_tokens", int(count or 0), cls)
    for state, count in (("queued", queued), ("held", held), ("preempted", preempted)):
        figures.add("prelay_jobs", count, state)
    figures.add("prelay_dead_letters", dead)
    figures.add("prelay_batches_open", open_batches)
    _add_batches(rest[: len(batches)], now_ms, figures)
    _add_depths(streams, rest[len(batches) :], now_ms, figures)


def _streams(keys: Keys, domains: Iterable[str]) -> list[tuple[str, str, str]]:
    """(class, stage, stream) of every work stream."""
    stages = [("prefill", "prefill"), *(("decode", f"decode:{domain}") for domain in domains)]
    return [(stream.rsplit(":", 2)[1], stage, stream) for stage, full in stages for stream in keys.work(full)]


def _add_batches(rows: Iterable[Iterable[Any]], now_ms: int, figures: Figures) -> None:
    """`rows`: of each batch when its lease ends, and lines in all, served and refused."""
    running = waiting = total = completed = failed = 0
    for row in rows:
        lease_ms, lines, done, refused = (int(value or 0) for value in row)
        held = lease_ms > now_ms
        running, waiting = running + held, waiting + (not held)
        total, completed, failed = total + lines, completed + done, failed + refused
    for state, count in (("running", running), ("waiting", waiting)):
        figures.add("prelay_batches", count, state)
    outstanding = max(0, total - completed - failed)
    counts = (total, completed, failed, outstanding)
    for state, count in zip(TABLE["prelay_batch_lines"].labels["state"], counts, strict=True):
        figures.add("prelay_batch_lines", count, state)


def _add_depths(streams: list[tuple[str, str, str]], found: list[Any], now_ms: int, figures: Figures) -> None:
    depth: dict[tuple[str, str], int] = {(cls, stage): 0 for cls in Priority for stage in ("prefill", "decode")}
    oldest: dict[tuple[str, str], int] = dict.fromkeys(depth, now_ms)
    for (cls, stage, _), length, first in zip(streams, found[::2], found[1::2], strict=True):
        depth[cls, stage] += length
        for entry, _ in first:
            oldest[cls, stage] = min(oldest[cls, stage], int(text(entry).partition("-")[0]))
    for labels, length in depth.items():
        figures.add("prelay_queue_depth", length, *labels)
        figures.add("prelay_queue_oldest_age_seconds", (now_ms - oldest[labels]) / 1000, *labels)


def _add_workers(fleet: Fleet, figures: Figures) -> None:
    roles, states = TABLE["prelay_workers"].labels.values()
    counts = dict.fromkeys(itertools.product(roles, states), 0)
    for worker in fleet.workers:
        state = "stale" if worker.stale else worker.state
        counts[worker.role, state] = counts.get((worker.role, state), 0) + 1
        _add_worker(worker, figures)
    for labels, count in counts.items():
        figures.add("prelay_workers", count, *labels)


def _add_worker(worker: Worker, figures: Figures) -> None:
    labels = str(worker.data.get("id", "")), worker.role
    figures.add("prelay_num_requests_running", _number(worker.data, "running"), *labels)
    figures.add("prelay_num_requests_waiting", _number(worker.data, "waiting"), *labels)
    kv = worker.data.get("kv")
    if not isinstance(kv, dict):
        return
    for state in TABLE["prelay_kv_blocks"].labels["state"]:
        figures.add("prelay_kv_blocks", _number(kv, state), *labels, state)
    total, available = _number(kv, "total"), _number(kv, "free") + _number(kv, "cached")
    figures.add("prelay_kv_blocks_limit", total, *labels)
    figures.add("prelay_kv_cache_usage_ratio", 1 - available / total if total else 0, *labels)


def _number(data: Mapping[str, Any], name: str) -> float:
    value = data.get(name, 0)
    return value if isinstance(value, int | float) else 0
