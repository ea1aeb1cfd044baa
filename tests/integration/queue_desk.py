"""A desk at which a test plays client, workers and sweeper, one script at a time, with the invariants checked."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from prelay_queue.events import LiveEvent, LogView, decode_live
from prelay_queue.job import Claim, FinishReason, JobSpec, Priority, Sampling
from prelay_queue.scripts import Call, Claimed, Emission, Emitted, Held, NewJob, Reaped, Requeued
from prelay_queue.settings import QueueSettings
from prelay_queue.state import SWEPT_IN, State
from tests.bed.double.data import INDEXES, Entry
from tests.integration.queue_backend import Backend, Picture, ServerBackend

R = TypeVar("R")

LEASE_MS = 60_000
WORKER_TTL_MS = 15_000
DOMAIN = "here"
JOB = "r/0"
P1, P2, D1, D2 = "prefill:1:a", "prefill:2:b", "decode:1:a", "decode:2:b"
API, OTHER_API = "api:1:a", "api:2:b"


@dataclass(eq=False)
class Desk:
    """Everything a test of the scripts needs. Every `run` checks the whole partition afterwards."""

    backend: Backend
    checked: bool = True  # off while a test has damaged the data on purpose

    def __post_init__(self) -> None:
        self.queue = self.backend.queue
        self.keys = self.queue.keys
        self.scripts = self.queue.scripts
        for stage in ("prefill", f"decode:{DOMAIN}"):
            self.make_groups(stage)

    def close(self) -> None:
        """Leave nothing on a shared server."""
        self.backend.lose_everything()
        self.queue.close()

    def make_groups(self, stage: str) -> None:
        for stream in self.keys.work(stage):
            self.backend.make_group(stream)

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
            if found := self.backend.read(stream, worker):
                entry, fields = found
                return stream, entry, fields["id"]
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

    def expire(self, limit: int = 100) -> tuple[str, ...]:
        return self.run(self.scripts.expire(limit))

    def beat(self, worker: str, ttl_ms: int = WORKER_TTL_MS, **status: Any) -> int:
        return self.run(self.scripts.beat(worker, {"id": worker, **status}, ttl_ms))

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

    def pass_deadline(self, job: str = JOB) -> None:
        """It is past the deadline that it has."""
        assert job in self.look().scores["deadlines"]
        self.backend.set_fields(job, dl=1)
        self.backend.set_score("deadlines", job, 1)

    def expire_lease(self, job: str = JOB) -> None:
        assert job in self.look().scores["leases"]
        self.backend.set_score("leases", job, 1)

    def leave_lease(self, left_ms: int, job: str = JOB) -> None:
        """Let so much be left of it."""
        self.backend.set_score("leases", job, self.now_ms() + left_ms)

    def last_heard(self, api: str, ago_ms: int) -> None:
        """Set when an API process was last heard of."""
        self.backend.set_score("apis", api, self.now_ms() - ago_ms)

    # What stands there.

    def look(self) -> Picture:
        """The whole partition: equal pictures mean that nothing at all was changed."""
        return self.backend.look()

    def now_ms(self) -> int:
        return self.backend.now_ms()

    def fields(self, job: str = JOB) -> dict[str, str]:
        return self.look().jobs[job]

    def view(self, job: str = JOB) -> LogView:
        found: LogView | None = self.queue.run(self.scripts.view(job))
        assert found is not None
        return found

    def log(self, job: str = JOB) -> list[Entry]:
        return self.look().logs.get(job, [])

    def lease_left_ms(self, job: str = JOB) -> float:
        return self.look().scores["leases"][job] - self.now_ms()

    def waiting(self) -> dict[str, list[str]]:
        """Work streams (their tails) that have entries, with the jobs named in order."""
        return _waiting(self.look())

    def entries(self, stream: str) -> list[Entry]:
        """Entries of a stream, named by its whole key; a stream that is not there has none."""
        return self.look().streams.get(stream.removeprefix(self.keys.prefix), [])

    def pending(self, stream: str) -> dict[str, str]:
        """Entries that were delivered and are not claimed, with their consumers."""
        return self.look().groups[stream.removeprefix(self.keys.prefix)][0]

    def consumers(self, stream: str) -> set[str]:
        return self.look().groups[stream.removeprefix(self.keys.prefix)][1]

    def has(self, key: str) -> bool:
        return key.removeprefix(self.keys.prefix) in self.look().names()

    def left_ms(self, key: str) -> int:
        """How long a key will live."""
        return self.look().left_ms[key.removeprefix(self.keys.prefix)]

    def listen(self, *apis: str) -> None:
        """Make the live streams, without which nobody writes."""
        for api in apis:
            self.backend.add(self.keys.live(api), {"e": "[]"})

    def heard(self, api: str = API) -> list[LiveEvent]:
        return [event for _, fields in self.entries(self.keys.live(api)) for event in decode_live(fields["e"].encode())]

    def mind(self, *workers: str) -> None:
        """Make the control streams of workers."""
        for worker in workers:
            self.backend.add(self.keys.control(worker), {"c": "{}"})

    def told(self, worker: str) -> list[tuple[str, str, int]]:
        """Commands to a worker: op, job, epoch."""
        commands = [orjson.loads(fields["c"]) for _, fields in self.entries(self.keys.control(worker))][1:]
        return [(c["op"], c["id"], c["ep"]) for c in commands]

    # What must hold after every script.

    def check(self) -> None:
        check(self.look(), self.keys.prefix)


def _waiting(picture: Picture) -> dict[str, list[str]]:
    streams = {name: entries for name, entries in sorted(picture.streams.items()) if name.startswith("work:")}
    return {name: [fields["id"] for _, fields in entries] for name, entries in streams.items() if entries}


def check(picture: Picture, prefix: str) -> None:
    """What must hold in any partition after every script."""
    waiting = [(stream, job) for stream, jobs in _waiting(picture).items() for job in jobs]
    swept = {index: set(picture.scores.get(index, ())) for index in INDEXES}
    assert set().union(*swept.values()) <= set(picture.jobs), "an index names a job that does not exist"
    assert {job for _, job in waiting} <= set(picture.jobs), "a work stream names a job that does not exist"
    assert set(picture.logs) <= set(picture.jobs), "a log without its job"
    _check_deadlines(picture)
    _check_waiting(picture)
    for job, fields in picture.jobs.items():
        state = State(fields["st"])
        home = {SWEPT_IN[state]} if state is not State.DONE else set()
        assert {index for index in INDEXES if job in swept[index]} == home, f"{job} is {state}"
        places = [stream for stream, name in waiting if name == job]
        if state in (State.QUEUED, State.STAGED):
            stage = "prefill" if state is State.QUEUED else f"decode:{DOMAIN}"
            assert len(places) == 1, f"{job} waits in {places}"
            assert places[0].startswith(f"work:{stage}:{fields['cls']}:")
            assert fields["sk"] == prefix + places[0]
        else:
            assert not places, f"{job} is {state} and waits in {places}"
            assert "sk" not in fields
        _check_fields(state, fields)
        _check_log(state, fields, picture.logs.get(job, []))
        for key in (f"job:{job}", f"log:{job}"):
            assert (key in picture.left_ms) == (state is State.DONE), f"{key} lives for ever, or not, and is {state}"


def _check_deadlines(picture: Picture) -> None:
    """Exactly the jobs that have one, and are not over, are in the index."""
    live = {job: int(fields["dl"]) for job, fields in picture.jobs.items() if fields["st"] != State.DONE}
    assert picture.scores.get("deadlines", {}) == {job: ms for job, ms in live.items() if ms}


def _check_waiting(picture: Picture) -> None:
    """What is counted as waiting is what waits."""
    sums: Counter[str] = Counter()
    shares: dict[str, str] = {}
    for job in picture.scores.get("queued", {}):
        cls, tokens = picture.jobs[job]["cls"], int(picture.jobs[job]["pt"])
        shares[job] = f"{cls} {tokens}"
        sums.update({f"#jobs:{cls}": 1, f"#tokens:{cls}": tokens})
    assert picture.waiting == shares | {name: str(count) for name, count in sums.items() if count}


def _check_fields(state: State, fields: dict[str, str]) -> None:
    assert bool(fields["ow"]) or SWEPT_IN.get(state) != "leases"
    assert not fields["ow"] or state is not State.QUEUED
    assert ("kvo" in fields) == ("kve" in fields) == ("kv" in fields) == (state in (State.STAGED, State.ADOPTING))
    assert ("spec" in fields) == (state is not State.DONE)


def _check_log(state: State, fields: dict[str, str], log: list[Entry]) -> None:
    tokens = [entry for entry, data in log if "t" in data]
    ends = [entry for entry, data in log if "f" in data]
    assert len(tokens) == int(fields["nx"])
    assert [int(entry.partition("-")[2]) for entry in tokens] == list(range(len(tokens)))
    epochs = [int(entry.partition("-")[0]) for entry in tokens]
    assert epochs == sorted(epochs)
    assert not epochs or epochs[-1] <= int(fields["ep"])
    assert len(ends) == (state is State.DONE)
    assert not ends or log[-1][0] == ends[0] == f"{fields['ep']}-{len(tokens)}"


class ServerDesk(Desk):
    """A desk at a real server, for what only a server has."""

    def __init__(self, settings: QueueSettings, checked: bool = True) -> None:
        backend = ServerBackend(settings)
        self.settings, self.redis = settings, backend.redis
        super().__init__(backend, checked)


def new_job(
    job: str = JOB,
    prompt: Sequence[int] = (1, 2, 3, 4),
    max_tokens: int = 16,
    attachment: str = f"{API}#1",
    priority: Priority = Priority.NORMAL,
    ttl_ms: int = 0,
    **extra: Any,
) -> NewJob:
    """`ttl_ms`: time to the deadline, 0 without one."""
    ends_at = time.monotonic() + ttl_ms / 1000 if ttl_ms else 0.0
    return NewJob(JobSpec(job, tuple(prompt), Sampling(max_tokens), priority), attachment, ends_at=ends_at, **extra)


def _given(claimed: Claimed) -> Claim:
    assert claimed.code == "ok"
    assert claimed.claim is not None
    return claimed.claim
