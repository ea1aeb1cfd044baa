"""The rules that all scripts share, in plain Python: what `_lib.lua` is for the real ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from prelay_queue.job import Priority
from prelay_queue.keys import Keys
from prelay_queue.state import SWEPT_IN, TRANSITIONS, Event, State

from .data import Drain, Job, Partition, Stream

RETENTION_MS = 300_000
KEYED_RETENTION_MS = 86_400_000
#: Crashes of a job in company after which it runs alone …
SUSPECT_CRASHES = 2
#: … until it is this many tokens past the last crash.
QUARANTINE = 4
#: Crashes of both kinds after which it is given up.
MAX_CRASHES = 8
#: Ends are noted when the queue has not been empty for so long; an older one counts so much less than the next.
SETTLED_MS, LATER = 1_000, 1 - 1 / 64
DRAIN_KEPT_MS = 3_600_000
#: What one who is refused is told while nothing is known, and at most.
UNKNOWN_MS, MOST_MS = 2_000, 600_000
#: Nobody is told longer than so many times what the queue of his class takes.
HERD = 10
LIVE_ENTRIES, CONTROL_ENTRIES, DEAD_LETTERS, RESTARTS = 4096, 1000, 1000, 1000
HISTORY_LINES = 64


@dataclass
class Rules:
    """One script call on one partition, at one moment of the server's clock. `flush` sends what was told."""

    data: Partition
    keys: Keys
    now_ms: int
    _outbox: dict[str, list[Any]] = field(default_factory=dict)

    # --- who is told

    def tell(self, job: Job, kind: str, epoch: int, *rest: object) -> None:
        """Every API process that watches hears of it once, in one entry a call; a quiet one of ends and preempts."""
        for api in job.apis:
            if api.startswith("~") and kind in "tr":
                continue
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

    def enter(self, job: Job, state: State, score_ms: int = 0, why: str = "") -> None:
        """A job that is not over is in exactly one swept index; one that is, in none."""
        if state is State.QUEUED:
            self.note_wait()
        if state is State.PREFILL and job.claimed_ms is None:
            job.claimed_ms = self.now_ms
        for name in SWEPT_IN.values():
            if name != SWEPT_IN.get(state):
                self.data.index(name).pop(job.id, None)
        if state in SWEPT_IN:
            self.data.index(SWEPT_IN[state])[job.id] = score_ms
        job.state = state
        line = f"{self.now_ms} {state} {job.epoch} {len(job.log)} {job.owner or '-'}"
        job.history = [*job.history, f"{line} {why}" if why else line][-HISTORY_LINES:]

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
        if job.state is not State.QUEUED:
            self.note_end(job)
        self.enter(job, State.DONE, why=reason)
        self.data.index("deadlines").pop(job.id, None)
        job.reason, job.error, job.ended_ms, job.spec = reason, error, self.now_ms, None
        job.expires_ms = self.now_ms + (KEYED_RETENTION_MS if job.key else RETENTION_MS)
        if job.key in self.data.keyed:
            request, digest, _ = self.data.keyed[job.key]
            self.data.keyed[job.key] = request, digest, self.now_ms + KEYED_RETENTION_MS
        self.tell(job, "e", job.epoch, len(job.log), reason, error)

    def restart(self, job: Job, resume: int, why: str = "") -> None:
        """The next attempt begins at step 1. The tokens below `resume` stand, -1: all; those after are gone."""
        lost = len(job.log) - resume if 0 <= resume < len(job.log) else 0
        told = {"id": job.id, "ep": str(job.epoch), "st": str(job.state), "ow": job.owner}
        told |= {"why": why or job.why or "", "lost": str(lost)}
        self.data.streams.setdefault(self.keys.restarts, Stream()).add(self.now_ms, told, RESTARTS)
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
        self.enter(job, State.QUEUED, self.now_ms, why)
        self.push(job, "prefill", "r")

    def abandon(self, job: Job, reason: str = "cancelled") -> None:
        """End a job that somebody may be running."""
        self.control(job.owner, "stop", job, job.epoch)
        self.conclude(job, reason)

    # --- how much may wait

    @property
    def _running(self) -> int:
        return len(self.data.index("leases")) + len(self.data.index("preempted"))

    @property
    def _drain(self) -> Drain:
        drain = self.data.drain = self.data.drain or Drain(self.now_ms)
        return drain

    def note_wait(self) -> None:
        """One more will wait."""
        if not self.data.index("queued"):
            self._drain.since_ms = self.now_ms
        if self.data.drain:
            self.data.drain.touched_ms = self.now_ms

    def note_end(self, job: Job) -> None:
        """A job that ran has ended."""
        drain = self.data.drain
        if not self.data.index("queued") or drain is None or drain.since_ms is None:
            return
        if self.now_ms - drain.since_ms >= SETTLED_MS:
            drain.last_ms = drain.touched_ms = self.now_ms
            drain.jobs = drain.jobs * LATER + 1
            drain.ms = drain.ms * LATER + self.now_ms - (job.claimed_ms or 0)
            drain.tokens = drain.tokens * LATER + job.prompt_tokens
            drain.slots = drain.slots * LATER + self._running

    def busy(self, cls: str, jobs: int, tokens: int, max_jobs: int, max_tokens: int) -> tuple[Any, ...] | None:
        """Why a request of so many jobs and prompt tokens is refused, and for how long; None when it is not."""
        stand = self.data.waiting(cls)
        if not jobs or not stand[0]:
            return None
        over = {"jobs": (stand[0], jobs, max_jobs), "tokens": (stand[1], tokens, max_tokens)}
        for kind, (waiting, asked, limit) in over.items():
            if limit and waiting + asked > limit:
                excess = [max(0, waiting + asked - limit) if limit else 0 for waiting, asked, limit in over.values()]
                return "busy", cls, kind, waiting, asked, limit, self._retry_ms(cls, (jobs, tokens), excess)
        return None

    def _retry_ms(self, cls: str, asked: Sequence[int], excess: Sequence[int]) -> int:
        drain = self._drain
        quiet_ms = self.now_ms - max(self.now_ms if drain.since_ms is None else drain.since_ms, drain.last_ms or 0)
        if not drain.jobs:
            return min(MOST_MS, max(UNKNOWN_MS, quiet_ms))
        took_ms, prompt = drain.ms / drain.jobs, max(1, drain.tokens / drain.jobs)
        slots = max(1, self._running, drain.slots / drain.jobs)

        def takes(jobs: float, tokens: float) -> float:
            return max(jobs, tokens / prompt) * took_ms / slots

        classes = list(Priority)
        before = classes[: classes.index(Priority(cls))]
        room_ms = takes(*excess) + sum(takes(*self.data.waiting(other)) for other in before)
        if quiet_ms > took_ms:
            room_ms = max(room_ms, quiet_ms)
        after_ms = max(room_ms, drain.due_ms.get(cls, 0) - self.now_ms + takes(*asked))
        after_ms = min(after_ms, MOST_MS, max(room_ms, HERD * takes(*self.data.waiting(cls))))
        drain.due_ms[cls] = self.now_ms + after_ms
        return math.ceil(after_ms)

    # --- its workers

    def live_roles(self) -> dict[str, set[str]]:
        """Roles of the workers that live and take work, by KV domain."""
        found: dict[str, set[str]] = {}
        for worker in self.data.index("workers"):
            said = orjson.loads(self.data.beats[worker][0]) if worker in self.data.beats else {}
            if said.get("domain") and said.get("role") and said.get("state") != "draining":
                found.setdefault(said["domain"], set()).add(said["role"])
        return found
