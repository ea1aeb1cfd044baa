"""What operators, crashes and a Redis that loses data may do to a history."""

from __future__ import annotations

from hypothesis import strategies as st

from prelay_queue.scripts import Held, Reaped
from prelay_queue.state import State
from tests.bed.double.data import Job
from tests.integration.queue_desk import DOMAIN
from tests.integration.queue_history import (
    ERROR,
    LEASE_MS,
    LONG_MS,
    MAX_TOKENS,
    STAGES,
    UNIFIED,
    WORKERS,
    History,
    happening,
    twice,
)


class Eventful(History):
    """A history in which anything may happen."""

    # Operators.

    @happening(2, lambda self: self.jobs)
    def evict(self, data: st.DataObject) -> None:
        self.run(self.scripts.evict(self.pick(data, self.jobs).id))

    @happening(3)
    def beat(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(WORKERS), "worker")
        state = data.draw(st.sampled_from(["ready", "draining"]), "state")
        role = {"P": "prefill", "D": "decode", "U": "unified"}[worker[0]]
        self.pair.each(lambda desk: desk.beat(worker, LEASE_MS, role=role, domain=DOMAIN, state=state))

    @happening(3, lambda self: self.having(State.STAGED))
    def a_staged_job_waits_long(self, data: st.DataObject) -> None:
        """It is stranded where a unified worker could run it and no decode worker is there."""
        job = self.pick(data, self.having(State.STAGED))
        assert job.exporter is not None
        if data.draw(twice, "unified"):
            self.pair.each(lambda desk: desk.beat(UNIFIED, LEASE_MS, role="unified", domain=DOMAIN, state="ready"))
        self.run(self.scripts.renew(job.exporter[0], LEASE_MS, [Held(job.id, job.epoch, "export")], -1))

    @happening(1)
    def tidy(self, data: st.DataObject) -> None:
        """A consumer that is left lives, or an entry pends for it."""
        self.pair.each(lambda desk: desk.run(desk.scripts.tidy()))
        for desk in (self.pair.real, self.pair.double):
            picture = desk.look()
            for stream, (pending, consumers) in picture.groups.items():
                known = DOMAIN in picture.domains or "prefill" in stream
                assert not known or consumers <= {*picture.beats, *pending.values()}

    @happening(1, lambda self: self.owned)
    def a_worker_is_seen_to_die(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted({job.owner for job in self.owned})), "worker")
        mine = {job.id for job in self.owned if job.owner == worker}
        assert self.run(self.scripts.disown(worker)) == len(mine)
        answer = self.sweep()
        assert {*answer.reaped, *answer.dead} == mine
        self.pair.each(lambda desk: desk.mind(worker))  # another takes its place

    # Recovery.

    @happening(4, lambda self: self.having(State.PREEMPTED))
    def a_stranger_requeues(self, data: st.DataObject) -> None:
        again = data.draw(twice, "again")
        resume = data.draw(st.integers(-1, MAX_TOKENS), "resume")
        job = self.pick(data, self.having(State.PREEMPTED))
        epoch, stood = job.epoch, len(job.log)
        for n in range(1 + again):
            answer = self.run(self.scripts.requeue(job.id, epoch, resume, "api:9:z#stranger"))
            code = "ok" if n == 0 else "lost" if job.state is State.QUEUED else "done"
            assert (answer.code, answer.epoch, answer.resume) == (code, epoch + 1, stood)

    @happening(2, lambda self: self.jobs)
    def an_answer_to_a_preempt_of_any_time_comes(self, data: st.DataObject) -> None:
        """A relay was held up: its requeue names an epoch that may be over, or may never have been."""
        job = self.pick(data, self.jobs)
        epoch, token = data.draw(st.integers(1, job.epoch + 1), "epoch"), " ".join(job.attachments)
        now = job.state is State.PREEMPTED and epoch == job.epoch
        self.run(self.scripts.requeue(job.id, epoch, -1, token))
        assert now or self.pair.real.look() == self.picture

    @happening(2)
    def sweep_preempted(self, data: st.DataObject) -> None:
        aged = data.draw(twice, "aged")
        preempted = self.having(State.PREEMPTED)
        self.age("preempted", preempted if aged else [])
        swept = self.sweep(grace_ms=LONG_MS // 2).requeued
        assert set(swept) == ({job.id for job in preempted} if aged else set())

    @happening(1)
    def sweep_queued(self, data: st.DataObject) -> None:
        aged = data.draw(twice, "aged")
        self.age("queued", self.having(State.QUEUED) if aged else [])
        self.sweep(check_ms=LONG_MS // 2)

    @happening(5, lambda self: self.owned)
    def crash(self, data: st.DataObject) -> None:
        """A worker dies, with all that it owns. A sweep that was held up on its way does nothing."""
        late = data.draw(st.sampled_from([False, False, True]), "late")
        worker = data.draw(st.sampled_from(sorted({job.owner for job in self.owned})), "worker")
        lost = {job.id for job in self.owned if job.owner == worker}
        for name in lost:
            self.pair.each(lambda desk, name: desk.expire_lease(name), name)
        if late:
            assert self.run(self.scripts.reap(100, 0, 0, 2, ERROR, 1)) == Reaped()
        answer = self.sweep()
        assert {*answer.reaped, *answer.dead} == lost

    @happening(3, lambda self: self.having(State.QUEUED))
    def a_job_kills_its_workers(self, data: st.DataObject) -> None:
        """It is suspected, runs alone, and is given up in the end."""
        job = self.pick(data, self.having(State.QUEUED))
        for _ in range(data.draw(st.integers(2, 5), "times")):
            if job.state is not State.QUEUED or self.claimed(self.pair.waiting(job.id), "P1") != "ok":
                return
            self.pair.each(lambda desk: desk.expire_lease(job.id))
            self.sweep()

    @happening(2, lambda self: self.having(*STAGES))
    def an_entry_is_lost(self, data: st.DataObject) -> None:
        """Somebody trims a work stream; the sweep, or the exporter's renewal, offers the job again."""
        job = self.pick(data, self.having(*STAGES))
        for desk, (stream, entry, _) in self.pair.waiting(job.id).items():
            if entry in dict(desk.entries(stream)):
                desk.backend.drop_entry(stream, entry)
        if job.exporter is None:
            self.age("queued", [job])
            assert job.id in self.sweep(check_ms=LONG_MS // 2).pushed
        else:
            self.run(self.scripts.renew(job.exporter[0], LEASE_MS, [Held(job.id, job.epoch, "export")]))

    @happening(3, lambda self: self.with_deadline)
    def a_deadline_passes(self, data: st.DataObject) -> None:
        """Whoever looks first ends the job, in whatever state it is, and only once."""
        looks = data.draw(st.integers(0, 2), "looks")
        job = self.pick(data, self.with_deadline)
        self.pair.each(lambda desk: desk.pass_deadline(job.id))
        late = {each.id for each in self.with_deadline if each.deadline_ms == 1}
        for n in range(looks):
            assert set(self.both(lambda desk: desk.expire())) == (late if n == 0 else set())

    @property
    def with_deadline(self) -> list[Job]:
        return [job for job in self.jobs if job.deadline_ms and job.state is not State.DONE]

    # Data loss.

    @happening(3)
    def a_replica_falls_behind(self, data: st.DataObject) -> None:
        self.kept = [*self.kept[-2:], self.pair.keep()]

    @happening(2)
    def redis_goes_back(self, data: st.DataObject) -> None:
        """A failover to a replica that was behind, or a restart with nothing. Everybody else remembers."""
        all_ = data.draw(st.sampled_from([False, False, True]), "all_")
        if all_ or not self.kept:
            self.pair.each(lambda desk: desk.backend.lose_everything())
            for stage in STAGES.values():
                self.pair.each(lambda desk, stage: desk.make_groups(stage), stage)
        else:
            data.draw(st.sampled_from(self.kept), "moment")()
        self.rollbacks += 1
        self.attend()
        for viewer in self.viewers:
            viewer.heard = len(self.live(viewer.api))
            viewer.want_log()

    @happening(1)
    def flush_the_scripts(self, data: st.DataObject) -> None:
        self.server.client.script_flush()
