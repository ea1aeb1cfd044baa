"""What stands in Redis under Prelay's keys, read without changing anything. prelay_queue/keys.py says what each key is.

The looks are not atomic: a job may move between two reads. Whoever judges them takes two and believes what both show.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import redis

from prelay_queue.keys import GROUP, Keys
from prelay_queue.scripts import text
from prelay_queue.state import SWEPT_IN

#: Longest time that one look takes, in seconds; a server with more keys is looked at in part.
LOOK_S = 10.0
#: Time between two looks, in seconds. A sweep comes each second.
BETWEEN_S = 1.5
#: Commands in one round trip.
BATCH = 500
#: Entries read of a stream at a time.
PAGE = 1000
#: Dead letters that are listed.
LETTERS = 1000
#: The swept indices by name.
INDICES = tuple(dict.fromkeys(SWEPT_IN.values()))

_KEY = re.compile(r"prelay:\{(.+)\.(\d+)\}:([a-z]+)(?::(.+))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Job:
    """The fields of a job that say where it must stand. `ttl_ms` is -1 where it never expires."""

    state: str
    stream: str
    entry: str
    ttl_ms: int


@dataclass(slots=True)
class Work:
    """A work stream: the job of each entry, and pending entries by consumer."""

    entries: dict[str, str] = field(default_factory=dict)
    consumers: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Fleet:
    """One partition of one fleet. `live` and `control` hold the time to live of each stream, in ms, -1 for ever."""

    keys: Keys
    now_ms: int = 0
    jobs: dict[str, Job] = field(default_factory=dict)
    indices: dict[str, dict[str, float]] = field(default_factory=lambda: {name: {} for name in INDICES})
    work: dict[str, Work] = field(default_factory=dict)
    workers: set[str] = field(default_factory=set)
    live: dict[str, int] = field(default_factory=dict)
    control: dict[str, int] = field(default_factory=dict)
    dead: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.keys.fleet}.{self.keys.partition}"

    @property
    def open_jobs(self) -> int:
        return sum(job.state != "done" for job in self.jobs.values())


@dataclass(frozen=True, slots=True)
class Look:
    """All fleets of a server. `complete` is False where the time ran out before all was read."""

    fleets: tuple[Fleet, ...] = ()
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Looks:
    """Two looks some time apart: what both show was not just on its way."""

    first: Look
    second: Look


class _Clock:
    """Says when to stop reading."""

    def __init__(self) -> None:
        self._end = time.monotonic() + LOOK_S
        self.ran_out = False

    def runs(self) -> bool:
        self.ran_out = self.ran_out or time.monotonic() > self._end
        return not self.ran_out


def look_twice(client: redis.Redis) -> Looks:
    """Look, and look again after longer than a sweep takes to come by. Raise RedisError."""
    first = look(client)
    if not first.fleets:
        return Looks(first, first)
    time.sleep(BETWEEN_S)
    return Looks(first, look(client))


def look(client: redis.Redis) -> Look:
    """Read every fleet's keys. Raise RedisError."""
    clock = _Clock()
    found: dict[str, Fleet] = {}
    named: dict[str, dict[str, list[str]]] = {}
    for key in _scan(client, clock):
        match = _KEY.fullmatch(key)
        if match is None:
            continue
        keys = Keys(match[1], int(match[2]))
        found.setdefault(keys.prefix, Fleet(keys))
        named.setdefault(keys.prefix, {}).setdefault(match[3], []).append(match[4] or "")
    for prefix, fleet in sorted(found.items()):
        _fill(client, fleet, named[prefix], clock)
    return Look(tuple(fleet for _, fleet in sorted(found.items())), not clock.ran_out)


def _scan(client: redis.Redis, clock: _Clock) -> Iterator[str]:
    for raw in client.scan_iter(match="prelay:{*", count=1000):
        if not clock.runs():
            return
        yield raw.decode(errors="replace")


def _fill(client: redis.Redis, fleet: Fleet, named: dict[str, list[str]], clock: _Clock) -> None:
    """1 The indices and streams, which name jobs. 2 The jobs that are named or were seen. 3 Who lives. 4 The dead."""
    keys = fleet.keys
    for name in INDICES:
        pairs: Any = client.zrange(f"{keys.prefix}{name}", 0, -1, withscores=True)
        fleet.indices[name] = {text(member): score for member, score in pairs}
    for tail in named.get("work", ()):
        stream = f"{keys.prefix}work:{tail}"
        fleet.work[stream] = _work(client, stream, clock)
    ids = dict.fromkeys(named.get("job", ()))
    ids.update(dict.fromkeys(id_ for index in fleet.indices.values() for id_ in index))
    ids.update(dict.fromkeys(id_ for work in fleet.work.values() for id_ in work.entries.values()))
    fleet.jobs = _jobs(client, keys, ids, clock)
    fleet.workers = set(named.get("worker", ()))
    fleet.live = _ttls(client, {api: keys.live(api) for api in named.get("live", ())})
    fleet.control = _ttls(client, {worker: keys.control(worker) for worker in named.get("ctl", ())})
    letters: Any = client.xrevrange(keys.dead, count=LETTERS)
    fleet.dead = {text(of.get(b"id", b"?")): text(of.get(b"why", b"")) for _, of in letters}
    seconds, micros = client.time()  # last: what is late by this clock was late when it was read
    fleet.now_ms = int(seconds) * 1000 + int(micros) // 1000


def _work(client: redis.Redis, stream: str, clock: _Clock) -> Work:
    found, start = Work(), "-"
    while clock.runs():
        page: Any = client.xrange(stream, min=start, count=PAGE)
        found.entries |= {text(entry): text((of or {}).get(b"id", b"")) for entry, of in page}
        if len(page) < PAGE:
            break
        start = f"({text(page[-1][0])}"
    try:
        consumers: Any = client.xinfo_consumers(stream, GROUP)
    except redis.ResponseError:  # no such group: its next reader makes it
        consumers = []
    found.consumers = {text(consumer["name"]): int(consumer["pending"]) for consumer in consumers}
    return found


def _jobs(client: redis.Redis, keys: Keys, ids: Iterable[str], clock: _Clock) -> dict[str, Job]:
    found: dict[str, Job] = {}
    for batch in _batches(ids):
        if not clock.runs():
            break
        with client.pipeline(transaction=False) as pipe:
            for id_ in batch:
                pipe.hmget(keys.job(id_), "st", "sk", "si")
                pipe.pttl(keys.job(id_))
            answers: list[Any] = pipe.execute(raise_on_error=False)
        for id_, fields, ttl in zip(batch, answers[::2], answers[1::2], strict=True):
            if ttl == -2 or isinstance(fields, Exception):  # not there, or no hash
                continue
            state, stream, entry = (text(value) if value else "" for value in fields)
            found[id_] = Job(state, stream, entry, int(ttl))
    return found


def _ttls(client: redis.Redis, keys: dict[str, str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for batch in _batches(keys):
        with client.pipeline(transaction=False) as pipe:
            for name in batch:
                pipe.pttl(keys[name])
            found |= zip(batch, pipe.execute(), strict=True)
    return {name: int(ttl) for name, ttl in found.items() if ttl != -2}


def _batches(names: Iterable[str]) -> Iterator[list[str]]:
    rest = iter(names)
    while batch := list(islice(rest, BATCH)):
        yield batch
