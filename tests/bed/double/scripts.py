"""Each script once more, in plain Python: what it does and what it answers, in the form in which Redis answers."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import orjson

from prelay_queue.scripts import Call
from prelay_queue.state import SWEPT_IN, TRANSITIONS, Event, State

from .data import INDEXES, Job, Stream
from .rules import DEAD_LETTERS, LIVE_ENTRIES, MAX_CRASHES, Rules

#: A key outlives any answer by this.
KEYED_RUN_MS = 604_800_000
#: A dead letter has its job if that is no longer.
LETTER_BYTES = 65_536


def stage_of(key: str) -> str:
    """The stage of a work stream: prefill or decode:<domain>."""
    return key.partition("}:work:")[2].rsplit(":", 2)[0]


def domain_of(key: str) -> str:
    return stage_of(key).partition(":")[2]


def request_of(job: str) -> str:
    return job.rpartition("/")[0]


def _noted(epoch: int, ids: Sequence[int], notes: Sequence[str]) -> list[tuple[int, int, str]]:
    return [(epoch, token, note) for token, note in zip(ids, notes or [""] * len(ids), strict=True)]


class Execution(Rules):
    """One script call."""

    def run(self, call: Call[Any]) -> Any:
        args = [arg.decode() if isinstance(arg, bytes) else arg for arg in call.args]
        answer = getattr(self, call.name)(*args)
        self.flush()
        return answer

    # --- clients

    def submit(self, jobs: str, version: int, max_jobs: int, max_tokens: int) -> Sequence[Any]:
        wanted = orjson.loads(jobs)
        if before := self._sent_before(wanted):
            return before
        fresh = [new["pt"] for new in wanted if new["id"] not in self.data.jobs and new["ep"] == 1]
        if fresh and (no := self.busy(wanted[0]["cls"], len(fresh), sum(fresh), max_jobs, max_tokens)):
            return no
        if wanted and (key := wanted[0]["ik"]) and (wanted[0]["ep"] == 1 or key not in self.data.keyed):
            self.data.keyed[key] = request_of(wanted[0]["id"]), wanted[0]["dg"], self.now_ms + KEYED_RUN_MS
        return [self._submit(new, version) for new in wanted]

    def _sent_before(self, wanted: list[dict[str, Any]]) -> Sequence[str] | None:
        """The request that has the key already, unless that failed or is forgotten."""
        if not wanted or not wanted[0]["ik"] or wanted[0]["ep"] > 1 or wanted[0]["ik"] not in self.data.keyed:
            return None
        request, digest, _ = self.data.keyed[wanted[0]["ik"]]
        if request == request_of(wanted[0]["id"]):
            return None
        if digest != wanted[0]["dg"]:
            return "other", request
        first = self.data.jobs.get(f"{request}/0")
        jobs = [self.data.jobs.get(f"{request}/{index}") for index in range(first.choices if first else 0)]
        if not jobs or any(job is None or job.reason not in (None, "stop", "length") for job in jobs):
            return None
        return "kept", request

    def _submit(self, new: dict[str, Any], version: int) -> str:
        if new["id"] in self.data.jobs:
            return "exists"
        job = Job(
            id=new["id"], version=version, epoch=new["ep"], cls=new["cls"], spec=new["spec"],
            prompt_tokens=new["pt"], max_tokens=new["mt"], choices=new["n"], submitted_ms=self.now_ms,
            deadline_ms=self.now_ms + new["ttl"] if new["ttl"] else 0, attachments=new["at"].split(),
            form=new["vw"], key=new["ik"],
            log=_noted(new["ep"], new["ids"], new["notes"]), resumes={new["ep"]: len(new["ids"])},
        )  # fmt: skip
        self.enter(job, State.QUEUED, self.now_ms)
        self.data.jobs[job.id] = job
        if job.deadline_ms:
            self.data.index("deadlines")[job.id] = job.deadline_ms
        for api in job.apis:  # it may never have said that it lives
            self.data.index("apis").setdefault(api, self.now_ms)
        if len(job.log) >= job.max_tokens:
            self.conclude(job, "length")
        else:
            self.push(job, "prefill", "r" if job.epoch > 1 else "n")
        return "new"

    def cancel(self, name: str, token: str) -> str:
        job = self.data.jobs.get(name)
        if job is None:
            return "gone"
        if job.state is State.DONE:
            return "done"
        if token:
            if token not in job.attachments:
                return "watched"
            job.attachments = [other for other in job.attachments if other != token]
            if job.attachments:
                return "watched"
        self.abandon(job)
        return "ended"

    def requeue(self, name: str, epoch: int, resume: int, token: str) -> tuple[str, int, int]:
        job = self.data.jobs.get(name)
        if job is None:
            return "gone", 0, 0
        if job.state is State.DONE:
            return "done", job.epoch, len(job.log)
        if job.state is not State.PREEMPTED or job.epoch != epoch:
            return "lost", job.epoch, job.resumes[job.epoch]
        sole = " ".join(job.attachments) == token
        self.restart(job, resume if sole else -1)
        return "ok", job.epoch, len(job.log)

    def view(self, name: str) -> Any:
        job = self.data.jobs.get(name)
        if job is None:
            return None
        resume = job.resumes.get(job.epoch, 0)
        return job.state, job.epoch, resume, job.reason or "", job.error or "", job.ids, job.notes, job.epochs

    def attach(self, name: str, token: str) -> Any:
        job = self.data.jobs.get(name)
        if job is None:
            return None
        if job.state is not State.DONE:
            job.attachments = [*(other for other in job.attachments if other != token), token]
            self.data.index("apis").setdefault(token.partition("#")[0], self.now_ms)
        left_ms = max(1, job.deadline_ms - self.now_ms) if job.deadline_ms else 0
        forgotten_ms = max(0, job.expires_ms - self.now_ms) if job.expires_ms else 0
        return job.state, job.form, (job.spec or "").encode(), job.choices, left_ms, forgotten_ms

    # --- workers

    def claim(
        self, key: str, entry: str, name: str, owner: str, lease_ms: int, place: int, version: int
    ) -> tuple[Any, ...]:
        job = self.data.jobs.get(name)
        waits = job is not None and job.place == (key, entry) and (job.state, Event.CLAIM) in TRANSITIONS
        again = (
            job is not None
            and (job.owner, job.claimed) == (owner, f"{key} {entry}")
            and job.state in (State.PREFILL, State.ADOPTING)
        )
        if job is None or not (waits or again):
            self.drop_entry(key, entry)
            return ("stale",)
        if not again:
            if self.overdue(job):
                self.conclude(job, "deadline")
                return ("ended",)
            if job.version > version or not place:
                newer = job.version > version
                self.unpush(job)
                self.push(job, stage_of(key), "n" if newer else "r")
                return ("newer",) if newer else ("back",)
            self.unpush(job)
            job.owner, job.claimed = owner, f"{key} {entry}"
            self.enter(job, TRANSITIONS[job.state, Event.CLAIM], self.now_ms + lease_ms)
            if job.unwanted == job.epoch:
                self.control(owner, "preempt", job, job.epoch)
        return (
            "ok", job.epoch, job.spec, job.kv or "", job.preemptions, self.alone_until(job),
            job.submitted_ms, job.deadline_ms, job.failed_handovers, job.ids,
        )  # fmt: skip

    def handoff(
        self, name: str, epoch: int, owner: str, seq: int, token: int, kv: str, domain: str, lease_ms: int, note: str
    ) -> str:
        job = self.data.jobs.get(name)
        if job is not None and job.exporter == (owner, epoch):
            return "ok"
        if no := self.refusal(name, epoch, owner, Event.HANDOFF):
            return no
        assert job is not None
        if (code := self.append(job, epoch, seq, [token], [note] if note else [])) != "ok":
            return code
        job.kv, job.exporter = kv, (owner, epoch)
        self.enter(job, State.STAGED, self.now_ms + lease_ms)
        self.data.domains.add(domain)
        self.push(job, f"decode:{domain}", "r" if epoch > 1 else "n")
        return "ok"

    def adopt(self, name: str, epoch: int, owner: str) -> str:
        no = self.refusal(name, epoch, owner, Event.ADOPT)
        job = self.data.jobs.get(name)
        if job is None or no:
            return "ok" if no == "illegal" and job and job.state is State.DECODE else str(no)
        self.release_export(job)
        job.failed_handovers = 0
        self.enter(job, State.DECODE, self.data.index("leases").get(name, self.now_ms))
        return "ok"

    def emit(self, owner: str, emissions: str) -> list[tuple[str, int]]:
        return [self._emit(owner, *each) for each in orjson.loads(emissions)]

    def _emit(
        self, owner: str, name: str, epoch: int, seq: int, ids: list[int], notes: Sequence[str] = ()
    ) -> tuple[str, int]:
        if no := self.refusal(name, epoch, owner, Event.EMIT):
            return no, 0
        job = self.data.jobs[name]
        return self.append(job, epoch, seq, ids, notes), len(job.log)

    def preempt(self, name: str, epoch: int, owner: str, reason: str) -> str:
        no = self.refusal(name, epoch, owner, Event.PREEMPT)
        job = self.data.jobs.get(name)
        if job is None or no:
            return "ok" if no == "illegal" and job and job.state is State.PREEMPTED else str(no)
        self.unpush(job)
        self.release_export(job)
        job.preemptions += 1
        job.why = reason
        job.failed_handovers += reason.startswith("hand-over")
        self.enter(job, State.PREEMPTED, self.now_ms, reason)
        self.tell(job, "p", epoch, reason)
        return "ok"

    def finish(self, name: str, epoch: int, owner: str, seq: int, ids: str, reason: str, error: str, notes: str) -> str:
        no = self.refusal(name, epoch, owner, Event.FINISH)
        job = self.data.jobs.get(name)
        if job is None or no:
            mine = job is not None and (job.epoch, job.owner, job.reason) == (epoch, owner, reason)
            return "ok" if no == "done" and mine else str(no)
        if (last := orjson.loads(ids)) and (code := self.append(job, epoch, seq, last, orjson.loads(notes))) != "ok":
            return code
        self.conclude(job, reason, error)
        return "ok"

    def renew(self, owner: str, lease_ms: int, held: str, stranded_ms: int) -> list[str]:
        return [self._renew(owner, lease_ms, stranded_ms, *each) for each in orjson.loads(held)]

    def _renew(self, owner: str, lease_ms: int, stranded_ms: int, name: str, epoch: int, kind: str) -> str:
        job = self.data.jobs.get(name)
        if kind == "run":
            answer = self._runs(job, epoch, owner)
        elif job is None or job.exporter != (owner, epoch):
            answer = "release"
        elif job.state is State.STAGED:
            answer = self._look_after(job, stranded_ms)
        else:
            answer = "hold"
        if job is not None and (answer == "kept" or (answer == "hold" and job.owner == owner)):
            self.data.index("leases")[name] = self.now_ms + lease_ms
        return answer

    def _runs(self, job: Job | None, epoch: int, owner: str) -> str:
        if job is None:
            return "lost"
        if job.state is State.DONE:
            return "done"
        mine = (job.epoch, job.owner) == (epoch, owner) and job.state is not State.PREEMPTED
        return "kept" if mine else "lost"

    def _look_after(self, job: Job, stranded_ms: int) -> str:
        """A staged job that its exporter holds."""
        assert job.place is not None
        key, entry = job.place
        waited_ms = self.now_ms - int(entry.partition("-")[0])
        if waited_ms > stranded_ms and self._stranded(domain_of(key)):
            self.restart(job, -1, "no decode worker")
            return "release"
        if self.entry_is_lost(job):
            self.push(job, stage_of(key), "r")
        return "hold"

    def _stranded(self, domain: str) -> bool:
        """Nobody of the domain decodes, and others could run the job from the start."""
        roles = self.live_roles()
        others = [found for other, found in roles.items() if other != domain]
        able = any(found >= {"prefill", "decode"} for found in others) or any("unified" in r for r in roles.values())
        return able and "decode" not in roles.get(domain, set())

    # --- sweepers

    def reap(
        self, limit: int, grace_ms: int, check_ms: int, max_alone: int, error: str, latest_ms: int, api_grace_ms: int
    ) -> tuple[list[str], ...]:
        if 0 < latest_ms < self.now_ms:
            return [], [], [], [], []
        reaped, dead = self._reap_leases(limit, max_alone, error)
        requeued = self._reap_preempted(limit, self.now_ms - grace_ms)
        pushed = self._reap_queued(limit, self.now_ms - check_ms)
        return reaped, requeued, pushed, dead, self._reap_viewers(self.now_ms - api_grace_ms)

    def _due(self, name: str, before_ms: float = inf, limit: int | None = None) -> list[Job]:
        """The jobs that an index names; what it names and should not is taken out."""
        index, found = self.data.index(name), []
        for member in self.data.due(name, before_ms, limit):
            job = self.data.jobs.get(member)
            if job is not None and SWEPT_IN.get(job.state) == name:
                found.append(job)
            else:
                del index[member]
        return found

    def _reap_leases(self, limit: int, max_alone: int, error: str) -> tuple[list[str], list[str]]:
        reaped, dead = [], []
        for job in self._due("leases", self.now_ms, limit):
            self.control(job.owner, "stop", job, job.epoch)
            if job.state is not State.STAGED:  # an exporter's death says nothing about a job that waits
                if len(job.log) <= self.alone_until(job):
                    job.crashes_alone += 1
                else:
                    job.crashes += 1
                job.crashed_at = len(job.log)
            if job.crashes_alone >= max_alone or job.crashes + job.crashes_alone >= MAX_CRASHES:
                spec = job.spec or ""
                self.conclude(job, "error", error)
                why = f"{job.crashes} crashes in company, {job.crashes_alone} alone"
                letters = self.data.streams.setdefault(self.keys.dead, Stream())
                kept = spec if len(spec.encode()) <= LETTER_BYTES else ""
                letter = {"id": job.id, "why": why, "spec": kept, "vw": job.form}
                letters.add(self.now_ms, letter, DEAD_LETTERS)
                dead.append(job.id)
            else:
                self.restart(job, -1, "lease ended")
                reaped.append(job.id)
        return reaped, dead

    def _reap_preempted(self, limit: int, before_ms: int) -> list[str]:
        jobs = self._due("preempted", before_ms, limit)
        for job in jobs:
            self.restart(job, -1, "no relay")
        return [job.id for job in jobs]

    def _reap_queued(self, limit: int, before_ms: int) -> list[str]:
        pushed = []
        for job in self._due("queued", before_ms, limit):
            if self.entry_is_lost(job):
                self.push(job, "prefill", "r")
                pushed.append(job.id)
            self.data.index("queued")[job.id] = self.now_ms
        return pushed

    def _reap_viewers(self, before_ms: int) -> list[str]:
        """One API process a sweep that is not heard of any more."""
        abandoned = []
        for api in self.data.due("apis", before_ms, 1):
            for job in [job for index in INDEXES for job in self._due(index)]:
                if api in job.apis:
                    job.attachments = [token for token in job.attachments if not token.startswith(f"{api}#")]
                    if not job.attachments:
                        self.abandon(job)
                        abandoned.append(job.id)
            del self.data.index("apis")[api]
        return abandoned

    def expire(self, limit: int) -> list[str]:
        late = self.data.due("deadlines", self.now_ms - 1, limit)
        for name in late:
            self.abandon(self.data.jobs[name], "deadline")
        return late

    # --- processes

    def beat(self, worker: str, status: str, ttl_ms: int) -> int:
        said = orjson.dumps({"t": self.now_ms, **orjson.loads(status)}).decode()
        self.data.beats[worker] = said, self.now_ms + ttl_ms
        workers = self.data.index("workers")
        workers[worker] = self.now_ms
        for gone in [name for name, seen_ms in workers.items() if seen_ms <= self.now_ms - 4 * ttl_ms]:
            del workers[gone]
        if control := self.data.streams.get(self.keys.control(worker)):
            control.expires_ms = self.now_ms + 60_000
        return self.now_ms

    def attend(self, api: str, ttl_s: int, begin: int) -> tuple[str, int]:
        key, entry = self.keys.live(api), ""
        if begin:
            entry = self.data.streams.setdefault(key, Stream()).add(self.now_ms, {"e": "[]"}, LIVE_ENTRIES)
        if key in self.data.streams:
            self.data.streams[key].expires_ms = self.now_ms + ttl_s * 1000
        self.data.index("apis")[api] = self.now_ms
        return entry, self.now_ms

    def evict(self, name: str) -> tuple[str, str, int]:
        job = self.data.jobs.get(name)
        if job is None:
            return "gone", "", 0
        if (job.state, Event.PREEMPT) not in TRANSITIONS:
            return job.state, "", job.epoch
        job.unwanted = job.epoch
        self.control(job.owner, "preempt", job, job.epoch)
        return job.state, job.owner, job.epoch

    def disown(self, prefix: str) -> int:
        if not prefix:
            return 0
        workers = self.data.index("workers")
        for worker in [name for name in workers if name.startswith(prefix)]:
            del workers[worker]
            self.data.beats.pop(worker, None)
            self.data.streams.pop(self.keys.control(worker), None)
        leases = self.data.index("leases")
        lost = [name for name in leases if name in self.data.jobs and self.data.jobs[name].owner.startswith(prefix)]
        leases.update(dict.fromkeys(lost, self.now_ms))
        return len(lost)

    def tidy(self) -> int:
        removed = 0
        for stage in ("prefill", *(f"decode:{domain}" for domain in self.data.domains)):
            for key in self.keys.work(stage):
                stream = self.data.streams.get(key)
                if stream is None or stream.group is None:
                    continue
                busy = set(stream.group.pending.values())
                gone = {name for name in stream.group.consumers - busy if name not in self.data.beats}
                stream.group.consumers -= gone
                removed += len(gone)
        return removed
