"""What stands behind the scripts, seen and damaged from outside: the same hands on a real server and on the double."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from redis.exceptions import ResponseError

from prelay_queue.client import SyncQueue
from prelay_queue.keys import GROUP
from prelay_queue.scripts import text
from prelay_queue.settings import QueueSettings
from prelay_queue.state import State
from tests.bed.double import MemoryQueue
from tests.bed.double.data import Drain, Entry, Group, Partition, Stream
from tests.bed.double.rules import DRAIN_KEPT_MS

#: All sorted sets: the swept indexes and the two registers of processes.
SCORES = ("queued", "leases", "preempted", "deadlines", "workers", "apis")


@dataclass
class Picture:
    """All that stands in a partition, by the ends of the keys. Equal pictures: nothing at all was changed."""

    jobs: dict[str, dict[str, str]] = field(default_factory=dict)
    logs: dict[str, list[Entry]] = field(default_factory=dict)
    scores: dict[str, dict[str, int]] = field(default_factory=dict)
    streams: dict[str, list[Entry]] = field(default_factory=dict)  # work:…, live:…, ctl:…, dead
    groups: dict[str, tuple[dict[str, str], set[str]]] = field(default_factory=dict)  # {entry: consumer}, consumers
    beats: dict[str, str] = field(default_factory=dict)
    domains: set[str] = field(default_factory=set)
    keyed: dict[str, dict[str, str]] = field(default_factory=dict)  # by the client's key
    waiting: dict[str, str] = field(default_factory=dict)
    drain: dict[str, float] = field(default_factory=dict, compare=False)  # of the moment
    left_ms: dict[str, int] = field(default_factory=dict, compare=False)  # of keys that expire

    def names(self) -> set[str]:
        """The ends of all keys."""
        names = [f"job:{job}" for job in self.jobs] + [f"log:{job}" for job in self.logs]
        names += [f"worker:{worker}" for worker in self.beats] + [f"idem:{key}" for key in self.keyed]
        alone = {"domains": self.domains, "waiting": self.waiting, "drain": self.drain}
        return {*names, *self.scores, *self.streams, *(name for name, what in alone.items() if what)}


class Backend(Protocol):
    """Hands on a partition, past the scripts. Streams are named by their whole key."""

    @property
    def queue(self) -> SyncQueue | MemoryQueue: ...

    def now_ms(self) -> int:
        """Server time."""

    def look(self) -> Picture:
        """See everything."""

    # What readers do.

    def make_group(self, stream: str) -> None:
        """Make a work stream and its group, unless they are there."""

    def read(self, stream: str, worker: str) -> Entry | None:
        """Have the next entry delivered."""

    def take_over(self, stream: str, worker: str) -> list[Entry]:
        """Have all that pends handed over."""

    # What accidents and operators do.

    def add(self, stream: str, fields: dict[str, str]) -> str:
        """Append an entry; the stream is made."""

    def drop_entry(self, stream: str, entry: str) -> None: ...
    def trim(self, stream: str) -> None: ...
    def delete(self, *streams: str) -> None: ...
    def drop_group(self, stream: str) -> None: ...
    def set_score(self, index: str, member: str, ms: float) -> None: ...
    def set_fields(self, job: str, **fields: str | int) -> None: ...
    def set_drain(self, **fields: float) -> None:
        """Change what was measured: since, last, jobs, ms, tokens, slots."""

    def forget(self, job: str) -> None:
        """A job that is over has lived its time."""

    def lose_everything(self) -> None: ...
    def full(self) -> contextlib.AbstractContextManager[None]:
        """Be over the memory limit meanwhile."""

    def keep(self) -> Callable[[], None]:
        """Remember everything; what is returned goes back to it."""


class ServerBackend:
    """A partition on a real server."""

    def __init__(self, settings: QueueSettings) -> None:
        self.queue = SyncQueue(settings)
        self.keys, self.redis = self.queue.keys, self.queue.redis

    def now_ms(self) -> int:
        seconds, micros = self.redis.time()
        return int(seconds) * 1000 + int(micros) // 1000

    def names(self) -> list[str]:
        """The ends of all keys."""
        prefix = self.keys.prefix
        return sorted(text(key).removeprefix(prefix) for key in self.redis.keys(f"{prefix}*"))

    def look(self) -> Picture:
        picture, names = Picture(), self.names()
        found = self._ask(names, self._read)
        for name, what, left_ms in zip(names, found, self._ask(names, lambda pipe, key: pipe.pttl(key)), strict=True):
            self._draw(picture, name, what)
            if left_ms >= 0:
                picture.left_ms[name] = left_ms
        work = [name for name in names if name.startswith("work:")]
        consumers = self._ask(work, lambda pipe, key: pipe.xinfo_consumers(key, GROUP))
        pending = self._ask(work, lambda pipe, key: pipe.xpending_range(key, GROUP, "-", "+", 10_000))
        for name, group, entries in zip(work, consumers, pending, strict=True):
            if not isinstance(group, ResponseError):  # there is one
                holders = {text(each["message_id"]): text(each["consumer"]) for each in entries}
                picture.groups[name] = holders, {text(each["name"]) for each in group}
        return picture

    def _ask(self, names: list[str], question: Callable[[Any, str], object]) -> list[Any]:
        """One question about each key, in one round trip; an error is the answer then."""
        with self.redis.pipeline(transaction=False) as pipe:
            for name in names:
                question(pipe, self.keys.prefix + name)
            return pipe.execute(raise_on_error=False)

    def _read(self, pipe: Any, key: str) -> None:
        match key.removeprefix(self.keys.prefix).partition(":")[0]:
            case "job" | "idem" | "waiting" | "drain":
                pipe.hgetall(key)
            case "worker":
                pipe.get(key)
            case "domains":
                pipe.smembers(key)
            case kind if kind in SCORES:
                pipe.zrange(key, 0, -1, withscores=True)
            case _:
                pipe.xrange(key)

    def _draw(self, picture: Picture, name: str, what: Any) -> None:
        kind, _, tail = name.partition(":")
        match kind:
            case "job":
                picture.jobs[tail] = _texts(what)
            case "log" if what:  # a log whose entries were all discarded stands as an empty stream
                picture.logs[tail] = _entries(what)
            case "log":
                pass
            case "idem":
                picture.keyed[tail] = _texts(what)
            case "worker":
                picture.beats[tail] = text(what)
            case "domains":
                picture.domains = {text(each) for each in what}
            case "waiting":
                picture.waiting = _texts(what)
            case "drain":
                picture.drain = {name: float(value) for name, value in _texts(what).items()}
            case _ if kind in SCORES:
                picture.scores[name] = {text(member): int(score) for member, score in what}
            case _:
                picture.streams[name] = _entries(what)

    def make_group(self, stream: str) -> None:
        with contextlib.suppress(ResponseError):  # BUSYGROUP: it is there
            self.redis.xgroup_create(stream, GROUP, id="0", mkstream=True)

    def read(self, stream: str, worker: str) -> Entry | None:
        reply: Any = self.redis.xreadgroup(GROUP, worker, {stream: ">"}, count=1)
        return _entries(reply[0][1])[0] if reply else None

    def take_over(self, stream: str, worker: str) -> list[Entry]:
        return _entries(self.redis.xautoclaim(stream, GROUP, worker, min_idle_time=0, count=10_000)[1])

    def add(self, stream: str, fields: dict[str, str]) -> str:
        flat = [part for pair in fields.items() for part in pair]
        return text(self.redis.execute_command("XADD", stream, "*", *flat))

    def drop_entry(self, stream: str, entry: str) -> None:
        assert self.redis.xdel(stream, entry) == 1

    def trim(self, stream: str) -> None:
        self.redis.xtrim(stream, maxlen=0)

    def delete(self, *streams: str) -> None:
        self.redis.delete(*streams)

    def drop_group(self, stream: str) -> None:
        self.redis.xgroup_destroy(stream, GROUP)

    def set_score(self, index: str, member: str, ms: float) -> None:
        plain = "#!lua flags=allow-oom\nreturn redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1])"  # on a full server too
        self.redis.eval(plain, 1, self.keys.prefix + index, member, int(ms))

    def set_fields(self, job: str, **fields: str | int) -> None:
        for name, value in fields.items():
            self.redis.hset(self.keys.job(job), name, str(value))

    def set_drain(self, **fields: float) -> None:
        self.redis.hset(self.keys.drain, mapping=fields)  # type: ignore[arg-type]

    def forget(self, job: str) -> None:
        for key in (self.keys.job(job), self.keys.log(job)):
            assert self.redis.pttl(key) > 0
            self.redis.pexpire(key, 0)

    def lose_everything(self) -> None:
        self.redis.delete(*(self.keys.prefix + name for name in self.names()), self.keys.dead)

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        self.redis.config_set("maxmemory", 1)
        try:
            yield
        finally:
            self.redis.config_set("maxmemory", 0)

    def keep(self) -> Callable[[], None]:
        names = self.names()
        dumps = self._ask(names, lambda pipe, key: pipe.dump(key))
        left_ms = self._ask(names, lambda pipe, key: pipe.pttl(key))

        def go_back() -> None:
            self.lose_everything()
            for name, dump, left in zip(names, dumps, left_ms, strict=True):
                self.redis.restore(self.keys.prefix + name, max(0, left), dump)

        return go_back


class DoubleBackend:
    """A partition in memory."""

    def __init__(self, settings: QueueSettings | None = None) -> None:
        self.queue = MemoryQueue(settings)
        self.keys = self.queue.keys

    def now_ms(self) -> int:
        return self.queue.clock()

    def look(self) -> Picture:
        data, now_ms = self.queue.data, self.now_ms()
        data.expire(now_ms)
        tail = {key: key.removeprefix(self.keys.prefix) for key in data.streams}
        expiry = {f"job:{job.id}": job.expires_ms for job in data.jobs.values()}
        expiry |= {f"log:{job.id}": job.expires_ms for job in data.jobs.values()}
        expiry |= {tail[key]: stream.expires_ms for key, stream in data.streams.items()}
        expiry |= {"drain": data.drain.touched_ms + DRAIN_KEPT_MS} if data.drain else {}
        expiry |= {f"idem:{key}": expires_ms for key, (_, _, expires_ms) in data.keyed.items()}
        expiry |= {f"worker:{worker}": expires_ms for worker, (_, expires_ms) in data.beats.items()}
        picture = Picture(
            jobs={job.id: job.fields() for job in data.jobs.values()},
            logs={job.id: entries for job in data.jobs.values() if (entries := job.entries())},
            scores={name: dict(index) for name, index in data.indexes.items() if index},
            streams={tail[key]: list(stream.entries.items()) for key, stream in data.streams.items()},
            groups={
                tail[key]: (dict(stream.group.pending), set(stream.group.consumers))
                for key, stream in data.streams.items()
                if stream.group is not None
            },
            beats={worker: said for worker, (said, _) in data.beats.items()},
            domains=set(data.domains),
            keyed={key: {"id": request, "dg": digest} for key, (request, digest, _) in data.keyed.items()},
            waiting=_waiting(data),
            drain=_drain(data.drain),
        )
        picture.left_ms = {
            name: ms - now_ms for name, ms in expiry.items() if ms is not None and name in picture.names()
        }
        return picture

    def make_group(self, stream: str) -> None:
        found = self.queue.data.streams.setdefault(stream, Stream())
        found.group = found.group or Group()

    def read(self, stream: str, worker: str) -> Entry | None:
        return self.queue.data.streams[stream].deliver(worker)

    def take_over(self, stream: str, worker: str) -> list[Entry]:
        return self.queue.data.streams[stream].take_over(worker)

    def add(self, stream: str, fields: dict[str, str]) -> str:
        return self.queue.data.streams.setdefault(stream, Stream()).add(self.now_ms(), fields)

    def drop_entry(self, stream: str, entry: str) -> None:
        del self.queue.data.streams[stream].entries[entry]

    def trim(self, stream: str) -> None:
        self.queue.data.streams[stream].entries.clear()

    def delete(self, *streams: str) -> None:
        for stream in streams:
            self.queue.data.streams.pop(stream, None)

    def drop_group(self, stream: str) -> None:
        self.queue.data.streams[stream].group = None

    def set_score(self, index: str, member: str, ms: float) -> None:
        self.queue.data.index(index)[member] = int(ms)

    def set_fields(self, job: str, **fields: str | int) -> None:
        attributes = {"dl": "deadline_ms", "v": "version", "spec": "spec"}
        for name, value in fields.items():
            setattr(self.queue.data.jobs[job], attributes[name], value)

    def set_drain(self, **fields: float) -> None:
        drain = self.queue.data.drain = self.queue.data.drain or Drain(0)
        for name, value in fields.items():
            setattr(drain, {"since": "since_ms", "last": "last_ms"}.get(name, name), value)

    def forget(self, job: str) -> None:
        assert self.queue.data.jobs[job].expires_ms is not None
        del self.queue.data.jobs[job]

    def lose_everything(self) -> None:
        self.queue.data = Partition()

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        self.queue.full = True
        try:
            yield
        finally:
            self.queue.full = False

    def keep(self) -> Callable[[], None]:
        kept = copy.deepcopy(self.queue.data)

        def go_back() -> None:
            self.queue.data = copy.deepcopy(kept)

        return go_back


def _waiting(data: Partition) -> dict[str, str]:
    """The hash that counts what waits."""
    queued = {job.id: (job.cls, job.prompt_tokens) for job in data.jobs.values() if job.state is State.QUEUED}
    found = {job: f"{cls} {tokens}" for job, (cls, tokens) in queued.items()}
    for cls in {cls for cls, _ in queued.values()}:
        jobs, tokens = data.waiting(cls)
        found |= {f"#jobs:{cls}": str(jobs)} | ({f"#tokens:{cls}": str(tokens)} if tokens else {})
    return found


def _drain(drain: Drain | None) -> dict[str, float]:
    if drain is None:
        return {}
    found: dict[str, float] = {} if drain.since_ms is None else {"since": drain.since_ms}
    if drain.last_ms is not None:
        found |= {"last": drain.last_ms, "jobs": drain.jobs, "ms": drain.ms, "tokens": drain.tokens}
        found |= {"slots": drain.slots}
    return found | {f"due:{cls}": ms for cls, ms in drain.due_ms.items()}


def _texts(fields: Any) -> dict[str, str]:
    return {text(name): text(value) for name, value in fields.items()}


def _entries(entries: Any) -> list[Entry]:
    return [(text(entry), _texts(fields)) for entry, fields in entries]
