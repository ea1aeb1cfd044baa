"""The rules that all scripts share, in plain Python: what `_lib.lua` is for the real ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from prelay_queue.keys import Keys
from prelay_queue.state import SWEPT_IN, TRANSITIONS, Event, State

from .data import Job, Partition, Stream

RETENTION_MS = 300_000
#: Crashes of a job in company after which it runs alone …
SUSPECT_CRASHES = 2
#: … until it is this many tokens past the last crash.
QUARANTINE = 4
#: Crashes of both kinds after which it is given up.
MAX_CRASHES = 8
LIVE_ENTRIES, CONTROL_ENTRIES, DEAD_LETTERS = 4096, 1000, 10_000


@dataclass
class Rules:
    """One script call on one partition, at one moment of the server's clock. `flush` sends what was told."""

    data: Partition
    keys: Keys
    now_ms: int
    _outbox: dict[str, list[Any]] = field(default_factory=dict)

    # --- who is told

    def tell(self, job: Job, kind: str, epoch: int, *rest: object) -> None:
        """Every API process that watches hears of it once, in one entry a call."""
        for api in job.apis:
            self._outbox.setdefault(api, []).append([kind, job.id, epoch, *rest])

    def flush(self) -> None:
        for api, events in self._outbox.items():
            self._write(self.keys.live(api), {"e": orjson.dumps(events).decode()}, LIVE_ENTRIES)

    def control(self, worker: str, op: str, job: Job, epoch: int) -> None:
        """A command to one worker."""
        command = orjson.dumps({"op": op, "id": job.id, "ep": epoch}).decode()
        self._write(self.keys.control(worker), {"c": command}, CONTROL_ENTRIES)

    def _write(self, key: str, fields: dict[str, str], most: int) -> None:
        """Whoever reads a stream makes it; without it nobody listens."""
        if key in self.data.streams:
            self.data.streams[key].add(self.now_ms, fields, most)

    # --- where a job is

    def enter(self, job: Job, state: State, score_ms: int = 0) -> None:
        """A job that is not over is in exactly one swept index; one that is, in none."""
        for name in SWEPT_IN.values():
            if name != SWEPT_IN.get(state):
                self.data.index(name).pop(job.id, None)
        if state in SWEPT_IN:
            self.data.index(SWEPT_IN[state])[job.id] = score_ms
        job.state = state

    def push(self, job: Job, stage: str, kind: str) -> None:
        """Put a waiting job into a work stream; `kind` r goes before n."""
        key = f"{self.keys.prefix}work:{stage}:{job.cls}:{kind}"
        alone = len(job.log) <= self.alone_until(job)
        fields = {"id": job.id, "tok": str(job.prompt_tokens + len(job.log)), "al": str(int(alone))}
        job.place = key, self.data.streams.setdefault(key, Stream()).add(self.now_ms, fields)

    def unpush(self, job: Job) -> None:
        if job.place is not None:
            self.drop_entry(*job.place)
            job.place = None

    def drop_entry(self, key: str, entry: str) -> None:
        if key in self.data.streams:
            self.data.streams[key].drop(entry)

    def entry_is_lost(self, job: Job) -> bool:
        """Somebody trimmed or deleted the stream under a job that waits."""
        if job.place is None:
            return True
        key, entry = job.place
        return key not in self.data.streams or entry not in self.data.streams[key].entries

    def release_export(self, job: Job) -> None:
        """Nobody will read this export any more: its holder may free it."""
        if job.exporter is not None:
            worker, epoch = job.exporter
            self.control(worker, "release", job, epoch)
            job.kv = job.exporter = None

    # --- what is allowed

    def refusal(self, name: str, epoch: int, owner: str, event: Event) -> str | None:
        """What is wrong with a write of (epoch, owner)."""
        job = self.data.jobs.get(name)
        if job is None:
            return "gone"
        if job.state is State.DONE:
            return "done"
        if (job.epoch, job.owner) != (epoch, owner) or not owner:
            return "fenced"
        return None if (job.state, event) in TRANSITIONS else "illegal"

    def overdue(self, job: Job) -> bool:
        return 0 < job.deadline_ms < self.now_ms

    def alone_until(self, job: Job) -> int:
        """The most tokens that may stand while it must run alone; -1: it need not."""
        return (job.crashed_at or 0) + QUARANTINE if job.crashes >= SUSPECT_CRASHES else -1

    # --- its answer

    def append(self, job: Job, epoch: int, seq: int, ids: Sequence[int], notes: Sequence[str] = ()) -> str:
        """What stands already is passed over; a gap is refused."""
        known = len(job.log) - seq
        if known < 0:
            return "gap"
        if fresh := list(ids[known:]):
            said = list(notes[known:])
            self.tell(job, "t", epoch, len(job.log), fresh, *([said] if said else []))
            job.log.extend((epoch, token, note) for token, note in zip(fresh, said or [""] * len(fresh), strict=True))
        return "ok"

    def conclude(self, job: Job, reason: str, error: str = "") -> None:
        """The one way a job ends."""
        self.unpush(job)
        self.release_export(job)
        self.enter(job, State.DONE)
        job.reason, job.error, job.ended_ms, job.spec = reason, error, self.now_ms, None
        job.expires_ms = self.now_ms + RETENTION_MS
        self.tell(job, "e", job.epoch, len(job.log), reason, error)

    def restart(self, job: Job, resume: int) -> None:
        """The next attempt begins at step 1. The tokens below `resume` stand, -1: all; those after are gone."""
        if 0 <= resume < len(job.log):
            del job.log[resume:]
        self.unpush(job)
        self.release_export(job)
        job.epoch += 1
        job.owner = ""
        job.resumes[job.epoch] = len(job.log)
        self.tell(job, "r", job.epoch, len(job.log))
        if len(job.log) >= job.max_tokens:
            self.conclude(job, "length")
            return
        self.enter(job, State.QUEUED, self.now_ms)
        self.push(job, "prefill", "r")

    def abandon(self, job: Job) -> None:
        """End a job that somebody may be running."""
        self.control(job.owner, "stop", job, job.epoch)
        self.conclude(job, "cancelled")

    # --- its workers

    def live_roles(self) -> dict[str, set[str]]:
        """Roles of the workers that live and take work, by KV domain."""
        found: dict[str, set[str]] = {}
        for worker in self.data.index("workers"):
            said = orjson.loads(self.data.beats[worker][0]) if worker in self.data.beats else {}
            if said.get("domain") and said.get("role") and said.get("state") != "draining":
                found.setdefault(said["domain"], set()).add(said["role"])
        return found
