"""What clients and workers may do with many jobs, on a real server and on the double alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from prelay_queue.errors import QueueBusy
from prelay_queue.events import decode_live
from prelay_queue.job import FinishReason, Priority
from prelay_queue.scripts import Call, Emission, Held, Reaped, Scripts
from prelay_queue.state import SWEPT_IN, State
from tests.bed.double.data import Entry, Job
from tests.bed.servers import Server
from tests.integration.queue_backend import ServerBackend
from tests.integration.queue_desk import API, DOMAIN, OTHER_API, Desk, new_job
from tests.integration.queue_pair import Delivery, Pair
from tests.integration.queue_viewer import Viewer, note_of

PREFILL, DECODE, UNIFIED = ("P1", "P2"), ("D1", "D2"), "U1"
WORKERS = (*PREFILL, *DECODE, UNIFIED)
STAGES = {State.QUEUED: "prefill", State.STAGED: f"decode:{DOMAIN}"}
NEVER_MS, LONG_MS = 10**9, 200_000
LEASE_MS = 600_000
MAX_TOKENS = 12
ERROR = '{"code":"crashed"}'
QUIET = f"~{OTHER_API}"
#: Who watches a job from its beginning; the first more often.
WATCHED_BY = [(API,), (API,), (OTHER_API,), (API, API), (API, OTHER_API), (API, QUIET), (QUIET,), ()]

twice = st.booleans()


def notes_of(ids: Sequence[int]) -> tuple[str, ...]:
    """One for each token, or none."""
    notes = tuple(map(note_of, ids))
    return notes if any(notes) else ()


def taken(desk: Desk, call: Call[tuple[str, ...]]) -> tuple[str, ...]:
    """What a submit says, also when it refuses."""
    try:
        return desk.run(call)
    except QueueBusy as busy:
        return "busy", busy.cls


@dataclass(frozen=True)
class Attempt:
    """Somebody who claimed a job once, and may go on writing for ever."""

    job: str
    epoch: int
    owner: str


When = Callable[[Any], object]
#: What may happen: how often, and when it can.
HAPPENINGS: dict[str, tuple[int, When]] = {}


def happening(weight: int, when: When = lambda _: True) -> Callable[[Any], Any]:
    """Register a method of History that draws what it needs."""

    def register(method: Any) -> Any:
        HAPPENINGS[method.__name__] = weight, when
        return method

    return register


class History:
    """Clients, workers, sweepers and accidents that do anything at any time, and repeat calls as after a lost reply."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.pair = Pair(ServerBackend(server.settings()))
        self.run, self.both, self.scripts = self.pair.run, self.pair.both, self.pair.scripts
        self.viewers: list[Viewer] = []
        self.attempts: list[Attempt] = []
        self.late: list[tuple[Delivery, str]] = []  # delivered, not claimed yet
        self.kept: list[Callable[[], None]] = []
        self.rollbacks = 0
        self.fresh = itertools.count(1000)  # no token is ever made twice: a wrong resume cannot hide
        self.attend()
        self.picture = self.pair.compare()

    def attend(self) -> None:
        """API processes and workers make the streams that they listen to."""
        for api in (API, OTHER_API, QUIET):
            self.both(lambda desk, api: bool(desk.run(desk.scripts.attend(api, 3600, begin=True))[0]), api)
        self.pair.each(lambda desk: desk.mind(*WORKERS))

    # Choices.

    @property
    def jobs(self) -> list[Job]:
        return list(self.pair.jobs.values())

    def having(self, *states: State) -> list[Job]:
        return [job for job in self.jobs if job.state in states]

    @property
    def owned(self) -> list[Job]:
        return [job for job in self.jobs if SWEPT_IN.get(job.state) == "leases"]

    @property
    def watching(self) -> list[Viewer]:
        return [viewer for viewer in self.viewers if viewer.end is None]

    def pick(self, data: st.DataObject, jobs: list[Job]) -> Job:
        return self.pair.jobs[data.draw(st.sampled_from([job.id for job in jobs]), "job")]

    def make(self, count: int) -> list[int]:
        return [next(self.fresh) for _ in range(count)]

    def sweep(self, grace_ms: int = NEVER_MS, check_ms: int = NEVER_MS) -> Reaped:
        return self.both(lambda desk: desk.reap(grace_ms=grace_ms, check_ms=check_ms))

    def age(self, index: str, jobs: list[Job]) -> None:
        at_ms = self.pair.double.now_ms() - LONG_MS
        for job in jobs:
            self.pair.each(lambda desk, job: desk.backend.set_score(index, job, at_ms), job.id)

    # The client and its API process.

    @happening(6, lambda self: len(self.jobs) < 8)
    def submit(self, data: st.DataObject) -> None:
        apis = data.draw(st.sampled_from(WATCHED_BY), "apis")
        max_tokens = data.draw(st.integers(2, MAX_TOKENS), "max_tokens")
        priority = data.draw(st.sampled_from([Priority.NORMAL, Priority.NORMAL, Priority.BATCH]), "priority")
        ttl_ms = data.draw(st.sampled_from([0, 0, LONG_MS]), "ttl_ms")
        again = data.draw(twice, "again")
        name = f"r{next(self.fresh)}/0"
        tokens = [f"{api}#{name}-{n}" for n, api in enumerate(apis)]
        new = new_job(name, (1, 2), max_tokens, " ".join(tokens), priority, ttl_ms=ttl_ms)
        for api, token in zip(apis, tokens, strict=True):
            if api == QUIET:
                continue  # hears too little to see an answer grow
            self.viewers.append(Viewer(new, api, token, heard=len(self.live(api))))
        assert self.run(self.scripts.submit([new])) == ("new",)
        if again:
            assert self.run(self.scripts.submit([new])) == ("exists",)

    @happening(3, lambda self: len(self.jobs) < 8)
    def submit_where_few_may_wait(self, data: st.DataObject) -> None:
        """Two choices without viewers: taken together where both have a place, else refused with nothing changed."""
        max_jobs = data.draw(st.integers(0, 4), "max_jobs")
        max_tokens = data.draw(st.sampled_from([0, 6, 12]), "max_tokens")
        priority = data.draw(st.sampled_from([Priority.NORMAL, Priority.BATCH]), "priority")
        name = f"r{next(self.fresh)}"
        news = [new_job(f"{name}/{n}", (1, 2, 3), 4, "", priority) for n in range(2)]
        jobs, tokens = self.pair.waits(priority)
        fits = (not max_jobs or jobs + 2 <= max_jobs) and (not max_tokens or tokens + 6 <= max_tokens)
        call = Scripts(self.pair.real.keys, {priority: max_jobs}, {priority: max_tokens}).submit(news)
        answer = self.both(lambda desk: taken(desk, call))
        assert answer == (("new", "new") if fits or not jobs else ("busy", priority))
        assert answer[0] == "new" or self.pair.real.look() == self.picture

    def live(self, api: str) -> list[Entry]:
        return self.pair.double.entries(self.pair.double.keys.live(api))

    def hear(self, viewer: Viewer, count: int | None = None) -> None:
        entries = self.live(viewer.api)[viewer.heard :][:count]
        viewer.heard += len(entries)
        viewer.hear([event for _, fields in entries for event in decode_live(fields["e"].encode())])

    def catch_up(self, viewer: Viewer) -> None:
        self.hear(viewer)
        while viewer.asked:
            viewer.act(self.scripts, self.run)

    @happening(6, lambda self: self.watching)
    def a_viewer_hears(self, data: st.DataObject) -> None:
        """Some live events come, or never do."""
        count = data.draw(st.sampled_from([1, 2, 5, None]), "count")
        lost = data.draw(st.sampled_from([False] * 5 + [True]), "lost")
        viewer = data.draw(st.sampled_from(self.watching), "viewer")
        if lost:
            viewer.heard = len(self.live(viewer.api))
        else:
            self.hear(viewer, count)

    @happening(8, lambda self: self.watching)
    def a_viewer_reads(self, data: st.DataObject) -> None:
        """The client is given more; sometimes its relay has heard and been answered all that there is."""
        held_back = data.draw(st.sampled_from([0, 0, 1, 3]), "held_back")
        calm = data.draw(twice, "calm")
        viewer = data.draw(st.sampled_from(self.watching), "viewer")
        if calm:
            self.catch_up(viewer)
        viewer.read(held_back)

    @happening(8, lambda self: any(viewer.asked for viewer in self.viewers))
    def a_viewer_is_answered(self, data: st.DataObject) -> None:
        viewer = data.draw(st.sampled_from([viewer for viewer in self.viewers if viewer.asked]), "viewer")
        viewer.act(self.scripts, self.run)

    @happening(3, lambda self: self.watching)
    def a_viewer_hears_nothing_for_long(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.watching), "viewer").want_log()

    @happening(2, lambda self: self.jobs)
    def cancel(self, data: st.DataObject) -> None:
        again = data.draw(twice, "again")
        everybody = data.draw(st.booleans(), "everybody")
        job = self.pick(data, self.jobs)
        token = data.draw(st.sampled_from(["" if everybody else "api:9:z#stranger", *job.attachments]), "token")
        for _ in range(1 + again):
            self.run(self.scripts.cancel(job.id, token))
        self.viewers = [viewer for viewer in self.viewers if viewer.token != token]

    @happening(1, lambda self: any(viewer.api == OTHER_API for viewer in self.viewers))
    def an_api_process_dies(self, data: st.DataObject) -> None:
        """After a grace it watches nothing any more. (Its name serves again, so that streams stay few.)"""
        mine = {job.id for job in self.jobs if job.apis == [OTHER_API] and job.state is not State.DONE}
        self.pair.each(lambda desk: desk.last_heard(OTHER_API, LONG_MS))
        assert set(self.sweep().abandoned) == mine
        self.viewers = [viewer for viewer in self.viewers if viewer.api != OTHER_API]
        self.both(lambda desk: desk.run(desk.scripts.attend(OTHER_API, 3600, begin=False))[0])

    # Workers.

    def claimed(self, delivery: Delivery, worker: str, *, place: bool = True) -> str:
        """Claim what was delivered, and answer with the code."""
        answer = self.both(lambda desk: desk.run(desk.scripts.claim(*delivery[desk], worker, LEASE_MS, place)))
        if answer.claim is not None:
            self.attempts.append(Attempt(answer.claim.id, answer.claim.epoch, worker))
        return answer.code

    @happening(12, lambda self: self.having(*STAGES))
    def claim(self, data: st.DataObject) -> None:
        again = data.draw(twice, "again")
        fate = data.draw(st.sampled_from(["placed"] * 4 + ["put back", "lost", "newer"]), "fate")
        state = data.draw(st.sampled_from(sorted({job.state for job in self.having(*STAGES)})), "state")
        worker = data.draw(st.sampled_from((*PREFILL, UNIFIED) if state is State.QUEUED else DECODE), "worker")
        delivery = self.deliver(worker, STAGES[state])
        if delivery is None:
            return
        if fate == "lost":  # the worker dies before it can claim, or is held up
            self.late.append((delivery, worker))
            return
        job = self.pair.jobs.get(delivery[self.pair.real][2])
        if fate == "newer" and job is not None:
            self.pair.each(lambda desk: desk.backend.set_fields(job.id, v=99))
        code = self.claimed(delivery, worker, place=fate != "put back")
        if again:
            assert self.claimed(delivery, worker, place=fate != "put back") == ("ok" if code == "ok" else "stale")
        if fate == "newer" and job is not None:
            self.pair.each(lambda desk: desk.backend.set_fields(job.id, v=1))

    @happening(2, lambda self: self.late)
    def a_late_claim(self, data: st.DataObject) -> None:
        """By then another may have taken the entry over, and anything may have become of the job."""
        delivery, worker = self.late.pop(data.draw(st.integers(0, len(self.late) - 1), "which"))
        self.claimed(delivery, worker)

    def deliver(self, worker: str, stage: str) -> Delivery | None:
        """The next entry that was not delivered before."""
        self.pair.each(lambda desk: desk.make_groups(stage))
        desk = self.pair.double
        if all(set(dict(desk.entries(stream))) <= set(desk.pending(stream)) for stream in desk.keys.work(stage)):
            return None
        return self.pair.deliver(worker, stage)

    @happening(2)
    def take_over(self, data: st.DataObject) -> None:
        """What was delivered to workers that never claimed it is claimed by another."""
        stage = data.draw(st.sampled_from(sorted(STAGES.values())), "stage")
        worker = data.draw(st.sampled_from(["P2", "D2"]), "worker")
        self.claim_what_pends(worker, stage)

    def claim_what_pends(self, worker: str, stage: str) -> None:
        self.pair.each(lambda desk: desk.make_groups(stage))
        for delivery in self.pair.take_over(worker, stage):
            self.claimed(delivery, worker)

    @happening(8, lambda self: self.having(State.QUEUED))
    def a_job_comes_to_decode(self, data: st.DataObject) -> None:
        """The common way, in one rule: single steps alone would seldom get this far."""
        count = data.draw(st.integers(0, 5), "count")
        unified = data.draw(st.sampled_from([False, False, True]), "unified")
        job = self.pick(data, self.having(State.QUEUED))
        first, last = (UNIFIED, UNIFIED) if unified else ("P1", "D1")
        if self.claimed(self.pair.waiting(job.id), first) != "ok":
            return
        if not unified:
            (token,) = self.make(1)
            kv = f"kv of {job.id}".encode()
            call = self.scripts.handoff(
                job.id, job.epoch, first, len(job.log), token, kv, DOMAIN, LEASE_MS, note_of(token)
            )
            assert self.run(call) == "ok"
            if self.claimed(self.pair.waiting(job.id), last) != "ok":
                return
        assert self.run(self.scripts.adopt(job.id, job.epoch, last)) == "ok"
        ids = tuple(self.make(min(count, job.max_tokens - len(job.log))))
        (answer,) = self.run(self.scripts.emit(last, [Emission(job.id, job.epoch, len(job.log), ids, notes_of(ids))]))
        assert (answer.code, answer.next) == ("ok", len(job.log))

    @happening(8, lambda self: self.having(State.PREFILL))
    def handoff(self, data: st.DataObject) -> None:
        again = data.draw(twice, "again")
        jump = data.draw(st.sampled_from([0, 0, 0, 1]), "jump")
        job = self.pick(data, self.having(State.PREFILL))
        (token,) = self.make(1)
        seq = len(job.log) + jump
        call = self.scripts.handoff(job.id, job.epoch, job.owner, seq, token, b"kv", DOMAIN, LEASE_MS, note_of(token))
        for _ in range(1 + again):
            assert self.run(call) == ("gap" if jump else "ok")

    @happening(6, lambda self: self.having(State.ADOPTING, State.PREFILL))
    def adopt(self, data: st.DataObject) -> None:
        again = data.draw(twice, "again")
        job = self.pick(data, self.having(State.ADOPTING, State.PREFILL))
        for _ in range(1 + again):
            assert self.run(self.scripts.adopt(job.id, job.epoch, job.owner)) == "ok"

    @happening(10, lambda self: self.having(State.DECODE))
    def emit(self, data: st.DataObject) -> None:
        """One step of one worker: all its jobs, some with tokens that stand already."""
        count = data.draw(st.integers(0, 4), "count")
        back = data.draw(st.integers(0, 3), "back")
        again = data.draw(twice, "again")
        owner = data.draw(st.sampled_from(sorted({job.owner for job in self.having(State.DECODE)})), "owner")
        step = []
        for job in self.having(State.DECODE):
            if job.owner == owner:
                seq = max(0, len(job.log) - back)
                fresh = self.make(min(count, max(0, job.max_tokens - len(job.log))))
                ids = (*job.ids[seq:], *fresh)
                step.append(Emission(job.id, job.epoch, seq, ids, notes_of(ids)))
        for _ in range(1 + again):
            answers = self.run(self.scripts.emit(owner, step))
            assert [(a.code, a.next) for a in answers] == [("ok", e.seq + len(e.ids)) for e in step]

    @happening(6, lambda self: self.owned)
    def preempt(self, data: st.DataObject) -> None:
        again = data.draw(twice, "again")
        job = self.pick(data, self.owned)
        reason = data.draw(st.sampled_from(["kv", "hand-over: refused"]), "reason")
        for _ in range(1 + again):
            assert self.run(self.scripts.preempt(job.id, job.epoch, job.owner, reason)) == "ok"

    @happening(2, lambda self: self.owned)
    def finish(self, data: st.DataObject) -> None:
        again = data.draw(twice, "again")
        count = data.draw(st.integers(0, 2), "count")
        jump = data.draw(st.sampled_from([0, 0, 0, 1]), "jump")
        job = self.pick(data, self.owned)
        ids = self.make(min(count, max(0, job.max_tokens - len(job.log))))
        seq, stop = len(job.log) + jump, FinishReason.STOP
        call = self.scripts.finish(job.id, job.epoch, job.owner, seq, ids, stop, notes=notes_of(ids))
        for _ in range(1 + again):
            assert self.run(call) == ("gap" if jump and ids else "ok")

    @happening(3)
    def renew(self, data: st.DataObject) -> None:
        """A worker renews all that it ever had: what it has still is kept, the rest is not."""
        worker = data.draw(st.sampled_from(WORKERS), "worker")
        left_ms = data.draw(st.sampled_from([LEASE_MS // 2, LEASE_MS]), "left_ms")
        for job in self.owned:
            self.pair.each(lambda desk, job: desk.leave_lease(left_ms, job), job.id)
        mine = list(dict.fromkeys(attempt for attempt in self.attempts if attempt.owner == worker))
        held = [Held(attempt.job, attempt.epoch, kind) for attempt in mine for kind in ("run", "export")]
        answers = self.run(self.scripts.renew(worker, LEASE_MS, held))
        for item, answer in zip(held, answers, strict=True):
            now = self.pair.jobs.get(item.job)
            has = now is not None and now.epoch == item.epoch and now in self.owned and now.owner == worker
            exports = now is not None and now.exporter == (worker, item.epoch)
            assert (answer == "kept") == (has and item.kind == "run")
            assert (answer == "hold") == (exports and item.kind == "export")

    @happening(12, lambda self: self.attempts)
    def somebody_of_any_time_writes(self, data: st.DataObject) -> None:
        """Whoever had a job once goes on as if nothing had happened. Only who has it now may change anything."""
        write = data.draw(st.sampled_from(["handoff", "adopt", "emit", "preempt", "finish", "renew"]), "write")
        offset = data.draw(st.integers(-2, 1), "offset")
        stranger = data.draw(st.sampled_from([False, False, True]), "stranger")
        owners = [Attempt(job.id, job.epoch, job.owner) for job in self.owned]
        attempt = data.draw(st.sampled_from(self.attempts) | st.sampled_from(owners or self.attempts), "attempt")
        shift = data.draw(st.sampled_from([0, 0, -1, 1]), "shift")
        name, epoch, owner = attempt.job, attempt.epoch + shift, "X1" if stranger else attempt.owner
        job = self.pair.jobs.get(name)
        seq = max(0, (len(job.log) if job else 0) + offset)
        ids = tuple(self.make(2 if job is None or seq + 2 <= job.max_tokens else 0))
        (token,) = self.make(1)
        scripts = self.scripts
        calls: dict[str, Call[Any]] = {
            "handoff": scripts.handoff(name, epoch, owner, seq, token, b"kv", DOMAIN, LEASE_MS, note_of(token)),
            "adopt": scripts.adopt(name, epoch, owner),
            "emit": scripts.emit(owner, [Emission(name, epoch, seq, ids, notes_of(ids))]),
            "preempt": scripts.preempt(name, epoch, owner, "kv"),
            "finish": scripts.finish(name, epoch, owner, seq, ids, FinishReason.STOP, notes=notes_of(ids)),
            "renew": scripts.renew(owner, LEASE_MS, [Held(name, epoch, "run")]),
        }
        current = job is not None and (job.epoch, job.owner) == (epoch, owner) and job.state is not State.DONE
        self.run(calls[write])
        if not current:
            assert self.pair.real.look() == self.picture

    # The end.

    def calm_down(self) -> None:
        for viewer in self.watching:
            viewer.want_log()
            self.catch_up(viewer)
            viewer.read()
        self.age("queued", self.having(State.QUEUED))
        self.age("preempted", self.having(State.PREEMPTED))
        self.sweep(grace_ms=LONG_MS // 2, check_ms=LONG_MS // 2)
        for job in self.having(State.QUEUED):
            self.claimed(self.pair.waiting(job.id), "P1")
        for job in self.owned:
            ids = self.make(min(1, max(0, job.max_tokens - len(job.log))))
            seq, stop = len(job.log), FinishReason.STOP
            call = self.scripts.finish(job.id, job.epoch, job.owner, seq, ids, stop, notes=notes_of(ids))
            assert self.run(call) == "ok"
