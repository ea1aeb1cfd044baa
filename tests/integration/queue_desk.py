"""A desk at which a test plays client, workers and sweeper, one script at a time, with the invariants checked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson
from redis.exceptions import ResponseError

from prelay_queue.client import SyncQueue
from prelay_queue.events import LiveEvent, LogView, decode_live
from prelay_queue.job import Claim, FinishReason, JobSpec, Priority, Sampling
from prelay_queue.keys import GROUP
from prelay_queue.log import read_log_sync
from prelay_queue.scripts import Call, Claimed, Emission, Emitted, Held, NewJob, Reaped, Requeued, text
from prelay_queue.settings import QueueSettings
from prelay_queue.state import SWEPT_IN, State
from tests.bed.servers import Server

R = TypeVar("R")

LEASE_MS = 60_000
DOMAIN = "here"
JOB = "r/0"
P1, P2, D1, D2 = "prefill:1:a", "prefill:2:b", "decode:1:a", "decode:2:b"
API, OTHER_API = "api:1:a", "api:2:b"
INDEXES = ("queued", "leases", "preempted")


@dataclass
class Desk:
    """Everything a test of the scripts needs. Every `run` checks the whole partition afterwards."""

    settings: QueueSettings
    checked: bool = True  # off while a test has damaged Redis on purpose
    queue: SyncQueue = field(init=False)

    def __post_init__(self) -> None:
        self.queue = SyncQueue(self.settings)
        self.keys = self.queue.keys
        self.redis = self.queue.redis
        self.scripts = self.queue.scripts
        for stage in ("prefill", f"decode:{DOMAIN}"):
            self.make_groups(stage)

    def close(self) -> None:
        """Leave nothing: every check looks through all keys of the server."""
        self.redis.delete(*(self.keys.prefix + key for key in self._scan("*")), self.keys.dead)
        self.queue.close()

    def make_groups(self, stage: str) -> None:
        for stream in self.keys.work(stage):
            with contextlib.suppress(ResponseError):  # BUSYGROUP: it is there
                self.redis.xgroup_create(stream, GROUP, id="0", mkstream=True)

    def run(self, call: Call[R]) -> R:
        answer = self.queue.run(call)
        if self.checked:
            self.check()
        return answer

    # The scripts, with the arguments that most tests do not care about.

    def submit(self, *jobs: NewJob) -> tuple[str, ...]:
        return self.run(self.scripts.submit(jobs or [new_job()]))

    def deliver(self, worker: str, stage: str = "prefill") -> tuple[str, str, str]:
        """Read one entry as `worker`: stream, entry id, job id."""
        for stream in self.keys.work(stage):
            reply: Any = self.redis.xreadgroup(GROUP, worker, {stream: ">"}, count=1)
            for name, entries in reply:
                for entry, fields in entries:
                    return text(name), text(entry), text(fields[b"id"])
        raise AssertionError(f"nothing waits for {stage}")

    def claim(self, worker: str, stage: str = "prefill", *, place: bool = True) -> Claimed:
        stream, entry, job = self.deliver(worker, stage)
        return self.run(self.scripts.claim(stream, entry, job, worker, LEASE_MS, place))

    def handoff(self, epoch: int = 1, owner: str = P1, seq: int = 0, token: int = 7, job: str = JOB) -> str:
        kv = f"kv of {job}@{epoch}".encode()
        return self.run(self.scripts.handoff(job, epoch, owner, seq, token, kv, DOMAIN, LEASE_MS))

    def adopt(self, epoch: int = 1, owner: str = D1, job: str = JOB) -> str:
        return self.run(self.scripts.adopt(job, epoch, owner))

    def emit(self, seq: int, ids: Sequence[int], epoch: int = 1, owner: str = D1, job: str = JOB) -> Emitted:
        (answer,) = self.run(self.scripts.emit(owner, [Emission(job, epoch, seq, tuple(ids))]))
        return answer

    def preempt(self, epoch: int = 1, owner: str = D1, job: str = JOB) -> str:
        return self.run(self.scripts.preempt(job, epoch, owner, "kv"))

    def requeue(self, resume: int, token: str = "", epoch: int = 1, job: str = JOB) -> Requeued:
        return self.run(self.scripts.requeue(job, epoch, resume, token))

    def renew(self, owner: str, kind: str = "run", epoch: int = 1, job: str = JOB, lease_ms: int = LEASE_MS) -> str:
        (answer,) = self.run(self.scripts.renew(owner, lease_ms, [Held(job, epoch, kind)]))
        return answer

    def finish(
        self,
        seq: int,
        ids: Sequence[int] = (),
        epoch: int = 1,
        owner: str = D1,
        reason: str = FinishReason.STOP,
        error: str = "",
        job: str = JOB,
    ) -> str:
        return self.run(self.scripts.finish(job, epoch, owner, seq, ids, reason, error))

    def cancel(self, token: str = "", job: str = JOB) -> str:
        return self.run(self.scripts.cancel(job, token))

    def reap(self, limit: int = 100, grace_ms: int = 0, check_ms: int = 0, max_alone: int = 2) -> Reaped:
        return self.run(self.scripts.reap(limit, grace_ms, check_ms, max_alone, '{"code":"crashed"}'))

    # Ways to a state.

    def to(self, state: State, job: NewJob | None = None) -> Claim:
        """Submit one job and bring it to `state`: prefill by P1, decode by D1, three tokens 7 8 9 at DECODE."""
        new = job or new_job()
        name = new.spec.id
        assert self.submit(new) == ("new",)
        claim = Claim(new.spec, new.epoch)
        if state is State.QUEUED:
            return claim
        claim = _given(self.claim(P1))
        if state is State.PREFILL:
            return claim
        assert self.handoff(claim.epoch, job=name, seq=len(claim.ids)) == "ok"
        if state is State.STAGED:
            return claim
        claim = _given(self.claim(D1, f"decode:{DOMAIN}"))
        if state is State.ADOPTING:
            return claim
        assert self.adopt(claim.epoch, job=name) == "ok"
        assert self.emit(len(claim.ids), (8, 9), claim.epoch, job=name).code == "ok"
        if state is State.DECODE:
            return claim
        if state is State.PREEMPTED:
            assert self.preempt(claim.epoch, job=name) == "ok"
        else:
            assert self.finish(len(claim.ids) + 2, (10,), claim.epoch, job=name) == "ok"
        return claim

    def crash(self, job: str = JOB) -> Reaped:
        """The owner stops renewing and a sweep finds it."""
        self.expire_lease(job)
        return self.reap(check_ms=10**9, grace_ms=10**9)

    def expire_lease(self, job: str = JOB) -> None:
        moved = "#!lua flags=allow-oom\nreturn redis.call('ZADD', KEYS[1], 'XX', 'CH', 1, ARGV[1])"
        assert self.redis.eval(moved, 1, self.keys.leases, job) == 1

    # What stands in Redis.

    def fields(self, job: str = JOB) -> dict[str, str]:
        found: Any = self.redis.hgetall(self.keys.job(job))
        return {text(name): text(value) for name, value in found.items()}

    def view(self, job: str = JOB) -> LogView:
        found = read_log_sync(self.queue, job)
        assert found is not None
        return found

    def log(self, job: str = JOB) -> list[tuple[str, dict[str, str]]]:
        entries: Any = self.redis.xrange(self.keys.log(job))
        return [(text(entry), {text(k): text(v) for k, v in data.items()}) for entry, data in entries]

    def now_ms(self) -> int:
        seconds, micros = self.redis.time()
        return int(seconds) * 1000 + int(micros) // 1000

    def lease_left_ms(self, job: str = JOB) -> float:
        score = self.redis.zscore(self.keys.leases, job)
        assert score is not None
        return float(score) - self.now_ms()

    def waiting(self) -> dict[str, list[str]]:
        """Work streams (their tails) that have entries, with the jobs named in order."""
        found = {}
        for key in self._scan("work:*"):
            entries: Any = self.redis.xrange(self.keys.prefix + key)
            if entries:
                found[key] = [text(data[b"id"]) for _, data in entries]
        return found

    def listen(self, *apis: str) -> None:
        """Make the live streams, without which nobody writes."""
        for api in apis:
            self.redis.xadd(self.keys.live(api), {"e": b"[]"})

    def heard(self, api: str = API) -> list[LiveEvent]:
        entries: Any = self.redis.xrange(self.keys.live(api))
        return [event for _, data in entries for event in decode_live(data[b"e"])]

    def mind(self, *workers: str) -> None:
        """Make the control streams of workers."""
        for worker in workers:
            self.redis.xadd(self.keys.control(worker), {"c": b"{}"})

    def told(self, worker: str) -> list[tuple[str, str, int]]:
        """Commands to a worker: op, job, epoch."""
        entries: Any = self.redis.xrange(self.keys.control(worker))
        commands = [orjson.loads(data[b"c"]) for _, data in entries][1:]
        return [(c["op"], c["id"], c["ep"]) for c in commands]

    def _scan(self, pattern: str) -> Iterator[str]:
        prefix = self.keys.prefix
        for key in sorted(self.redis.keys(f"{prefix}{pattern}")):
            yield text(key).removeprefix(prefix)

    def snapshot(self) -> dict[str, Any]:
        """The whole partition: equal snapshots mean that nothing at all was changed."""
        return {key: self._content(self.keys.prefix + key) for key in self._scan("*")}

    def _content(self, key: str) -> Any:
        match self.redis.type(key):
            case b"hash":  # its dump depends on the order of the buckets
                return self.redis.hgetall(key)
            case b"set":
                return self.redis.smembers(key)
            case _:
                return self.redis.dump(key)

    # What must hold after every script.

    def check(self) -> None:
        waiting = [(stream, job) for stream, jobs in self.waiting().items() for job in jobs]
        swept = {index: {text(m) for m in self.redis.zrange(self.keys.prefix + index, 0, -1)} for index in INDEXES}
        jobs = [key.removeprefix("job:") for key in self._scan("job:*")]
        assert set().union(*swept.values()) <= set(jobs), "an index names a job that does not exist"
        assert {job for _, job in waiting} <= set(jobs), "a work stream names a job that does not exist"
        for job in jobs:
            fields = self.fields(job)
            state = State(fields["st"])
            home = {SWEPT_IN[state]} if state is not State.DONE else set()
            assert {index for index in INDEXES if job in swept[index]} == home, f"{job} is {state}"
            places = [stream for stream, name in waiting if name == job]
            if state in (State.QUEUED, State.STAGED):
                stage = "prefill" if state is State.QUEUED else f"decode:{DOMAIN}"
                assert len(places) == 1, f"{job} waits in {places}"
                assert places[0].startswith(f"work:{stage}:{fields['cls']}:")
                assert fields["sk"] == self.keys.prefix + places[0]
            else:
                assert not places, f"{job} is {state} and waits in {places}"
                assert "sk" not in fields
            self._check_job(job, state, fields)

    def _check_job(self, job: str, state: State, fields: dict[str, str]) -> None:
        owned = SWEPT_IN.get(state) == "leases"
        assert bool(fields["ow"]) or not owned
        assert not fields["ow"] or state is not State.QUEUED
        assert ("kvo" in fields) == (state in (State.STAGED, State.ADOPTING))
        assert ("spec" in fields) == (state is not State.DONE)
        log = self.log(job)
        tokens = [entry for entry, data in log if "t" in data]
        ends = [entry for entry, data in log if "f" in data]
        assert len(tokens) == int(fields["nx"])
        assert [int(entry.partition("-")[2]) for entry in tokens] == list(range(len(tokens)))
        epochs = [int(entry.partition("-")[0]) for entry in tokens]
        assert epochs == sorted(epochs)
        assert not epochs or epochs[-1] <= int(fields["ep"])
        assert len(ends) == (state is State.DONE)
        assert not ends or log[-1][0] == ends[0] == f"{fields['ep']}-{len(tokens)}"
        for key in (self.keys.job(job), self.keys.log(job)):
            left = self.redis.pttl(key)
            assert (left > 0) == (state is State.DONE) or left == -2, f"{key} lives {left} ms and is {state}"


def at_desk(server: Server) -> Iterator[Desk]:
    """A desk of the test's own on a shared server; for `yield from` in a fixture."""
    desk = Desk(server.settings())
    yield desk
    desk.close()


def new_job(
    job: str = JOB,
    prompt: Sequence[int] = (1, 2, 3, 4),
    max_tokens: int = 16,
    attachment: str = f"{API}#1",
    priority: Priority = Priority.NORMAL,
    **extra: Any,
) -> NewJob:
    return NewJob(JobSpec(job, tuple(prompt), Sampling(max_tokens), priority), attachment, **extra)


def _given(claimed: Claimed) -> Claim:
    assert claimed.code == "ok"
    assert claimed.claim is not None
    return claimed.claim
