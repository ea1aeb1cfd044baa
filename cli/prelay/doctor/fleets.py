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

from prelay_queue.batches import BatchStatus
from prelay_queue.keys import GROUP, Keys
from prelay_queue.scripts import text
from prelay_queue.state import SWEPT_IN

#: Longest time that one look takes, in seconds; a server with more keys is looked at in part.
LOOK_S = 10.0
#: Time between two looks, in seconds. A sweep comes each second.
BETWEEN_S = 1.5
#: Commands in one round trip.
AT_ONCE = 500
#: Entries read of a stream at a time.
PAGE = 1000
#: Dead letters that are listed.
LETTERS = 1000
#: The swept indices by name.
INDICES = tuple(dict.fromkeys(SWEPT_IN.values()))

_OVER = frozenset(str(status) for status in BatchStatus if status.over)
_KEY = re.compile(r"prelay:\{(.+)\.(\d+)\}:([a-z]+)(?::(.+))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Job:
    """The fields of a job that say where it must stand. `ttl_ms` is -1: never expires, `deadline_ms` is 0: none."""

    state: str
    stream: str
    entry: str
    ttl_ms: int
    deadline_ms: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """The fields of a batch that say who looks after it; `lease_ms` is when that ends, and 0 before anybody did."""

    status: str
    lease_ms: int
    created_ms: int
    ttl_ms: int

    @property
    def over(self) -> bool:
        return self.status in _OVER


@dataclass(slots=True)
class Work:
    """A work stream: the job of each entry, and pending entries by consumer."""

    entries: dict[str, str] = field(default_factory=dict)
    consumers: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Fleet:
    """One partition of one fleet. `live`, `control` and `keyed` hold the time to live of each key, in ms, -1 for ever.

    `deadlines` and `batch_index` are sorted sets, `waiting` the hash that counts what waits.
    """

    keys: Keys
    now_ms: int = 0
    jobs: dict[str, Job] = field(default_factory=dict)
    indices: dict[str, dict[str, float]] = field(default_factory=lambda: {name: {} for name in INDICES})
    work: dict[str, Work] = field(default_factory=dict)
    workers: set[str] = field(default_factory=set)
    live: dict[str, int] = field(default_factory=dict)
    control: dict[str, int] = field(default_factory=dict)
    dead: dict[str, str] = field(default_factory=dict)
    deadlines: dict[str, float] = field(default_factory=dict)
    waiting: dict[str, str] = field(default_factory=dict)
    keyed: dict[str, int] = field(default_factory=dict)
    batches: dict[str, Batch] = field(default_factory=dict)
    batch_index: dict[str, float] = field(default_factory=dict)

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
    """1 The indices and streams, which name jobs. 2 The jobs that are named or were seen. 3 Batches, in the same way.
    4 Who lives. 5 The dead."""
    keys = fleet.keys
    fleet.indices = {name: _scores(client, f"{keys.prefix}{name}") for name in INDICES}
    fleet.deadlines = _scores(client, keys.deadlines)
    shares: Any = client.hgetall(keys.waiting)
    fleet.waiting = {text(name): text(value) for name, value in shares.items()}
    for tail in named.get("work", ()):
        stream = f"{keys.prefix}work:{tail}"
        fleet.work[stream] = _work(client, stream, clock)
    ids = dict.fromkeys(named.get("job", ()))
    ids.update(dict.fromkeys(id_ for index in fleet.indices.values() for id_ in index))
    ids.update(dict.fromkeys(id_ for work in fleet.work.values() for id_ in work.entries.values()))
    ids.update(dict.fromkeys((*fleet.deadlines, *(name for name in fleet.waiting if not name.startswith("#")))))
    fleet.jobs = _jobs(client, keys, ids, clock)
    fleet.batch_index = _scores(client, keys.batches)
    fleet.batches = _batches(client, keys, dict.fromkeys((*named.get("batch", ()), *fleet.batch_index)), clock)
    fleet.workers = set(named.get("worker", ()))
    fleet.live = _ttls(client, {api: keys.live(api) for api in named.get("live", ())})
    fleet.control = _ttls(client, {worker: keys.control(worker) for worker in named.get("ctl", ())})
    fleet.keyed = _ttls(client, {key: keys.keyed(key) for key in named.get("idem", ())})
    letters: Any = client.xrevrange(keys.dead, count=LETTERS)
    fleet.dead = {text(of.get(b"id", b"?")): text(of.get(b"why", b"")) for _, of in letters}
    seconds, micros = client.time()  # last: what is late by this clock was late when it was read
    fleet.now_ms = int(seconds) * 1000 + int(micros) // 1000


def _scores(client: redis.Redis, key: str) -> dict[str, float]:
    pairs: Any = client.zrange(key, 0, -1, withscores=True)
    return {text(member): score for member, score in pairs}


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
    hashes = _hashes(client, {id_: keys.job(id_) for id_ in ids}, ("st", "sk", "si", "dl"), clock)
    return {id_: Job(st, stream, entry, ttl, _number(dl)) for id_, ((st, stream, entry, dl), ttl) in hashes.items()}


def _batches(client: redis.Redis, keys: Keys, ids: Iterable[str], clock: _Clock) -> dict[str, Batch]:
    hashes = _hashes(client, {id_: keys.batch(id_) for id_ in ids}, ("st", "lease", "created"), clock)
    return {id_: Batch(st, _number(lease), _number(new), ttl) for id_, ((st, lease, new), ttl) in hashes.items()}


def _number(words: str) -> int:
    return int(words) if words.isdecimal() else 0


def _hashes(
    client: redis.Redis, keys: dict[str, str], fields: tuple[str, ...], clock: _Clock
) -> dict[str, tuple[list[str], int]]:
    """Some fields, '' where there is none, and the time to live of each hash that there is."""
    found: dict[str, tuple[list[str], int]] = {}
    for some in _parts(keys):
        if not clock.runs():
            break
        with client.pipeline(transaction=False) as pipe:
            for name in some:
                pipe.hmget(keys[name], fields)
                pipe.pttl(keys[name])
            answers: list[Any] = pipe.execute(raise_on_error=False)
        for name, values, ttl in zip(some, answers[::2], answers[1::2], strict=True):
            if ttl != -2 and not isinstance(values, Exception):  # it is there, and is a hash
                found[name] = [text(value) if value else "" for value in values], int(ttl)
    return found


def _ttls(client: redis.Redis, keys: dict[str, str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for some in _parts(keys):
        with client.pipeline(transaction=False) as pipe:
            for name in some:
                pipe.pttl(keys[name])
            found |= zip(some, pipe.execute(), strict=True)
    return {name: int(ttl) for name, ttl in found.items() if ttl != -2}


def _parts(names: Iterable[str]) -> Iterator[list[str]]:
    rest = iter(names)
    while part := list(islice(rest, AT_ONCE)):
        yield part
