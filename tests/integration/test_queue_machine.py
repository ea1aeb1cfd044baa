"""Random histories of many jobs on a real server, beside a model: whatever happens, the protocol's promises hold."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from prelay_queue.events import EndedEvent
from prelay_queue.scripts import Claimed, Emission, Held, Requeued
from prelay_queue.state import State
from tests.bed.servers import Server, binary_of, running
from tests.integration.queue_desk import API, DOMAIN, LEASE_MS, ServerDesk, new_job
from tests.integration.queue_model import Job, Viewer

PREFILL, DECODE = ("P1", "P2", "P3"), ("D1", "D2", "D3")
NEVER_MS = 10**9
MAX_TOKENS = 12

twice = st.booleans()


class QueueMachine(RuleBasedStateMachine):
    """Clients, workers and sweepers that do anything at any time, and repeat their calls as after a lost reply."""

    server: Server

    def __init__(self) -> None:
        super().__init__()
        self.server.client.flushall()
        self.desk = ServerDesk(self.server.settings())
        self.desk.listen(API)
        self.jobs: dict[str, Job] = {}
        self.fresh = itertools.count(1000)  # no token is ever made twice: a wrong resume cannot hide

    # Choices.

    def having(self, *states: State) -> list[Job]:
        return [job for job in self.jobs.values() if job.state in states]

    def pick(self, data: st.DataObject, jobs: list[Job]) -> Job:
        return data.draw(st.sampled_from(jobs), "job")

    def make(self, count: int) -> list[int]:
        return [next(self.fresh) for _ in range(count)]

    # The client.

    @precondition(lambda self: len(self.jobs) < 8)
    @rule(viewers=st.sampled_from([1, 1, 1, 0, 2]), max_tokens=st.integers(2, MAX_TOKENS), again=twice)
    def submit(self, viewers: int, max_tokens: int, again: bool) -> None:
        name = f"r{len(self.jobs)}/0"
        watching = [Viewer(f"{API}#{name}-{n}") for n in range(viewers)]
        new = new_job(name, (1, 2), max_tokens, " ".join(viewer.token for viewer in watching))
        assert self.desk.submit(new) == ("new",)
        if again:
            assert self.desk.submit(new) == ("exists",)
        self.jobs[name] = Job(name, max_tokens, watching)

    @precondition(lambda self: any(job.viewers for job in self.having(State.DECODE, State.STAGED, State.DONE)))
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        """A relay gives more of the log to its client. While a job is preempted, its relays are frozen."""
        job = self.pick(data, [j for j in self.having(State.DECODE, State.STAGED, State.DONE) if j.viewers])
        viewer = data.draw(st.sampled_from(job.viewers), "viewer")
        ids = list(self.desk.view(job.id).ids)
        viewer.delivered = ids[: data.draw(st.integers(len(viewer.delivered), len(ids)), "delivered")]

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), again=twice, everybody=st.booleans())
    def cancel(self, data: st.DataObject, again: bool, everybody: bool) -> None:
        job = self.pick(data, list(self.jobs.values()))
        watching = [viewer.token for viewer in job.viewers]
        token = "" if everybody or not watching else data.draw(st.sampled_from(watching), "token")
        answer = self.desk.cancel(token, job.id)
        if job.state is State.DONE:
            assert answer == "done"
            return
        job.viewers = [viewer for viewer in job.viewers if viewer.token != token]
        if token and job.viewers:
            assert answer == "watched"
        else:
            assert answer == "ended"
            job.end("cancelled")
        if again:
            assert self.desk.cancel(token, job.id) == ("watched" if answer == "watched" else "done")

    # Workers.

    @precondition(lambda self: self.having(State.QUEUED, State.STAGED))
    @rule(data=st.data(), again=twice, place=st.sampled_from([True, True, True, False]))
    def claim(self, data: st.DataObject, again: bool, place: bool) -> None:
        kind = data.draw(
            st.sampled_from(sorted({job.state for job in self.having(State.QUEUED, State.STAGED)})), "kind"
        )
        worker = data.draw(st.sampled_from(PREFILL if kind is State.QUEUED else DECODE), "worker")
        stage = "prefill" if kind is State.QUEUED else f"decode:{DOMAIN}"
        stream, entry, name = self.desk.deliver(worker, stage)
        job = self.jobs[name]
        assert job.state is kind
        call = self.desk.scripts.claim(stream, entry, name, worker, LEASE_MS, place)
        answer = self.desk.run(call)
        if not place:
            assert answer == Claimed("back")
            assert self.desk.run(call) == Claimed("stale")
            return
        job.claim(worker)
        claim = answer.claim
        assert claim is not None
        assert (claim.id, claim.epoch, claim.ids) == (job.id, job.epoch, job.ids)
        assert (claim.preemptions, claim.alone) == (job.preemptions, job.alone)
        if again:
            assert self.desk.run(call) == answer

    @precondition(lambda self: self.having(State.QUEUED))
    @rule(data=st.data(), count=st.integers(1, 5))
    def a_job_comes_to_decode(self, data: st.DataObject, count: int) -> None:
        """The common way, in one rule: single steps alone would seldom get this far."""
        job = self.jobs[self.desk.deliver("P1")[2]]
        fields = self.desk.fields(job.id)
        answer = self.desk.run(self.desk.scripts.claim(fields["sk"], fields["si"], job.id, "P1", LEASE_MS))
        assert answer.code == "ok"
        job.claim("P1")
        token, *more = self.make(min(count, job.max_tokens - 1 - len(job.log)) or 1)
        assert self.desk.handoff(job.epoch, "P1", len(job.log), token, job.id) == "ok"
        job.handoff(token)
        fields = self.desk.fields(job.id)
        answer = self.desk.run(self.desk.scripts.claim(fields["sk"], fields["si"], job.id, "D1", LEASE_MS))
        assert answer.code == "ok"
        job.claim("D1")
        assert self.desk.adopt(job.epoch, "D1", job.id) == "ok"
        job.adopt()
        assert self.desk.emit(len(job.log), more, job.epoch, "D1", job.id).code == "ok"
        job.emit(more)

    @precondition(lambda self: self.having(State.DECODE))
    @rule(data=st.data(), part=st.floats(0, 1))
    def a_preempt_and_its_relay(self, data: st.DataObject, part: float) -> None:
        """A viewer has seen a part; the worker gives up; the relay asks for what it delivered."""
        job = self.pick(data, self.having(State.DECODE))
        for viewer in job.viewers:
            seen = max(len(viewer.delivered), int(part * len(job.log)))
            viewer.delivered = list(job.ids[:seen])
        assert self.desk.preempt(job.epoch, job.owner, job.id) == "ok"
        job.preempt()
        if job.viewers:
            self.requeue(job, job.viewers[0], again=False)

    @precondition(lambda self: self.having(State.PREFILL))
    @rule(data=st.data(), again=twice)
    def handoff(self, data: st.DataObject, again: bool) -> None:
        job = self.pick(data, self.having(State.PREFILL))
        seq, (token,) = len(job.log), self.make(1)
        assert self.desk.handoff(job.epoch, job.owner, seq, token, job.id) == "ok"
        job.handoff(token)
        if again:
            assert self.desk.handoff(job.epoch, job.owner, seq, token, job.id) == "ok"

    @precondition(lambda self: self.having(State.PREFILL, State.ADOPTING))
    @rule(data=st.data(), again=twice)
    def adopt(self, data: st.DataObject, again: bool) -> None:
        job = self.pick(data, self.having(State.PREFILL, State.ADOPTING))
        exporter = job.exporter
        for _ in range(1 + again):
            assert self.desk.adopt(job.epoch, job.owner, job.id) == "ok"
        job.adopt()
        if exporter:
            assert self.desk.renew(exporter, "export", job.epoch, job.id) == "release"

    @precondition(lambda self: self.having(State.DECODE))
    @rule(data=st.data(), again=twice, overlap=st.integers(0, 3), count=st.integers(0, 4))
    def emit(self, data: st.DataObject, again: bool, overlap: int, count: int) -> None:
        job = self.pick(data, self.having(State.DECODE))
        mine = [token for epoch, token in job.log if epoch == job.epoch]
        old = mine[len(mine) - min(overlap, len(mine)) :]
        new = self.make(min(count, job.max_tokens - 1 - len(job.log)))
        seq = len(job.log) - len(old)
        for _ in range(1 + again):
            assert self.desk.emit(seq, [*old, *new], job.epoch, job.owner, job.id).code == "ok"
        job.emit(new)

    @precondition(lambda self: self.having(State.DECODE))
    @rule(data=st.data(), jump=st.integers(1, 3))
    def emit_past_the_end(self, data: st.DataObject, jump: int) -> None:
        job = self.pick(data, self.having(State.DECODE))
        answer = self.desk.emit(len(job.log) + jump, self.make(1), job.epoch, job.owner, job.id)
        assert (answer.code, answer.next) == ("gap", len(job.log))

    @precondition(lambda self: any(job.owned for job in self.jobs.values()))
    @rule(data=st.data(), again=twice)
    def preempt(self, data: st.DataObject, again: bool) -> None:
        job = self.pick(data, [job for job in self.jobs.values() if job.owned])
        for _ in range(1 + again):
            assert self.desk.preempt(job.epoch, job.owner, job.id) == "ok"
        job.preempt()

    @precondition(lambda self: any(job.owned for job in self.jobs.values()))
    @rule(data=st.data(), again=twice, count=st.integers(0, 2))
    def finish(self, data: st.DataObject, again: bool, count: int) -> None:
        job = self.pick(data, [job for job in self.jobs.values() if job.owned])
        seq, ids = len(job.log), self.make(min(count, job.max_tokens - len(job.log)))
        for _ in range(1 + again):
            assert self.desk.finish(seq, ids, job.epoch, job.owner, job=job.id) == "ok"
        job.finish(ids)

    @precondition(lambda self: any(job.owned for job in self.jobs.values()))
    @rule()
    def renew(self) -> None:
        for worker in (*PREFILL, *DECODE):
            mine = [job for job in self.jobs.values() if job.owned and job.owner == worker]
            held = [Held(job.id, job.epoch, "run") for job in mine]
            answers = self.desk.run(self.desk.scripts.renew(worker, LEASE_MS, held))
            assert answers == ("kept",) * len(mine)
        for job in self.jobs.values():
            if job.exporter:
                assert self.desk.renew(job.exporter, "export", job.epoch, job.id) == "hold"

    @precondition(lambda self: any(job.zombies for job in self.jobs.values()))
    @rule(data=st.data(), write=st.sampled_from(["handoff", "adopt", "emit", "preempt", "finish", "renew"]))
    def a_zombie_writes(self, data: st.DataObject, write: str) -> None:
        """Whoever was fenced goes on as if nothing had happened."""
        job = self.pick(data, [job for job in self.jobs.values() if job.zombies])
        epoch, owner = data.draw(st.sampled_from(job.zombies), "zombie")
        seq, ids = len(job.log), self.make(1)
        answer = {
            "handoff": lambda: self.desk.handoff(epoch, owner, seq, ids[0], job.id),
            "adopt": lambda: self.desk.adopt(epoch, owner, job.id),
            "emit": lambda: (
                self.desk.run(self.desk.scripts.emit(owner, [Emission(job.id, epoch, seq, tuple(ids))]))[0].code
            ),
            "preempt": lambda: self.desk.preempt(epoch, owner, job.id),
            "finish": lambda: self.desk.finish(seq, ids, epoch, owner, job=job.id),
            "renew": lambda: self.desk.renew(owner, "run", epoch, job.id),
        }[write]()
        allowed = {"fenced", "done", "lost"}
        if (epoch, owner) == (job.epoch, job.owner):  # it gave the job up itself
            allowed |= {"illegal"} | ({"ok"} if write == "preempt" else set())
        if write == "handoff" and (epoch, owner) == (job.epoch, job.exporter):
            allowed |= {"ok"}  # a repeat, while the export stands
        if write == "finish" and job.reason == "stop" and (epoch, owner) == (job.epoch, job.owner):
            allowed |= {"ok"}
        assert answer in allowed, (answer, job)

    # Recovery.

    @precondition(lambda self: self.having(State.PREEMPTED))
    @rule(data=st.data(), again=twice)
    def requeue_by_relay(self, data: st.DataObject, again: bool) -> None:
        job = self.pick(data, self.having(State.PREEMPTED))
        viewer = data.draw(st.sampled_from([*job.viewers, Viewer("api:9:z#stranger")]), "viewer")
        self.requeue(job, viewer, again)

    def requeue(self, job: Job, viewer: Viewer, again: bool) -> None:
        resume, epoch = len(viewer.delivered), job.epoch
        answer = self.desk.requeue(resume, viewer.token, epoch, job.id)
        sole = [v.token for v in job.viewers] == [viewer.token]
        job.requeue(resume if sole else len(job.log))
        assert answer == Requeued("ok", job.epoch, len(job.log))
        if again:
            code = "done" if job.state is State.DONE else "lost"
            assert self.desk.requeue(resume, viewer.token, epoch, job.id) == Requeued(code, job.epoch, len(job.log))

    @precondition(lambda self: self.having(State.PREEMPTED))
    @rule()
    def sweep_preempted(self) -> None:
        preempted = self.having(State.PREEMPTED)
        assert set(self.desk.reap(grace_ms=0, check_ms=NEVER_MS).requeued) == {job.id for job in preempted}
        for job in preempted:
            assert job.reap() == "requeued"

    @precondition(lambda self: any(job.owned for job in self.jobs.values()))
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        """A worker dies, with all that it owns."""
        worker = data.draw(st.sampled_from(sorted({job.owner for job in self.jobs.values() if job.owned})), "worker")
        lost = [job for job in self.jobs.values() if job.owned and job.owner == worker]
        for job in lost:
            self.desk.expire_lease(job.id)
        answer = self.desk.reap(grace_ms=NEVER_MS, check_ms=NEVER_MS)
        expected = {job.id: job.reap() for job in lost}
        assert set(answer.reaped) == {name for name, where in expected.items() if where == "reaped"}
        assert set(answer.dead) == {name for name, where in expected.items() if where == "dead"}

    @precondition(lambda self: self.having(State.QUEUED, State.STAGED))
    @rule(data=st.data())
    def lose_an_entry(self, data: st.DataObject) -> None:
        """Somebody trims a work stream; the sweep, or the exporter's renewal, offers the job again."""
        job = self.pick(data, self.having(State.QUEUED, State.STAGED))
        fields = self.desk.fields(job.id)
        self.desk.redis.xdel(fields["sk"], fields["si"])
        if job.state is State.QUEUED:
            assert self.desk.reap(grace_ms=NEVER_MS, check_ms=0).pushed == (job.id,)
        else:
            assert self.desk.renew(job.exporter, "export", job.epoch, job.id) == "hold"

    @rule()
    def flush_the_scripts(self) -> None:
        self.server.client.script_flush()

    # Promises.

    @invariant()
    def redis_holds_what_the_model_says(self) -> None:
        for job in self.jobs.values():
            fields = self.desk.fields(job.id)
            state, epoch, count = fields["st"], int(fields["ep"]), int(fields["nx"])
            assert (state, epoch, count) == (job.state, job.epoch, len(job.log))
            assert fields["ow"] == job.owner
            assert fields.get("fin", "") == job.reason
            assert (int(fields["pe"]), int(fields["cr"]), int(fields["ca"])) == (
                job.preemptions, job.crashes, job.crashes_alone,
            )  # fmt: skip
            log = [
                (int(entry.partition("-")[0]), int(data["t"])) for entry, data in self.desk.log(job.id) if "t" in data
            ]
            assert log == job.log
            assert int(fields[f"rs:{epoch}"]) == job.resumes[epoch]

    @invariant()
    def nobody_was_told_what_does_not_stand(self) -> None:
        for job in self.jobs.values():
            for viewer in job.viewers:
                assert list(job.ids[: len(viewer.delivered)]) == viewer.delivered

    @invariant()
    def a_job_ends_once(self) -> None:
        heard = Counter(event.job for event in self.desk.heard() if isinstance(event, EndedEvent))
        assert all(count == 1 for count in heard.values())
        for name, job in self.jobs.items():
            assert job.state is State.DONE or name not in heard
            assert job.state is not State.DONE or name in heard or not job.viewers

    def teardown(self) -> None:
        """End all that is left: then no index, no entry and no pending delivery may be left."""
        for job in self.jobs.values():
            if job.state is not State.DONE:
                assert self.desk.cancel("", job.id) == "ended"
        keys = self.desk.keys
        assert not self.desk.redis.exists(keys.queued, keys.leases, keys.preempted)
        assert self.desk.waiting() == {}
        for stage in ("prefill", f"decode:{DOMAIN}"):
            for stream in keys.work(stage):
                assert self.desk.redis.xpending(stream, "g")["pending"] == 0
        self.desk.queue.close()


@pytest.fixture(scope="module")
def machine_server() -> Iterator[Server]:
    for server in running("redis" if binary_of("redis") else "valkey"):
        server.client.config_set("appendonly", "no")
        yield server


def _run(server: Server, examples: int, steps: int) -> None:
    QueueMachine.server = server
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        QueueMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


def test_random_histories_keep_the_promises(machine_server: Server) -> None:
    _run(machine_server, examples=25, steps=40)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_long_random_histories_keep_the_promises(machine_server: Server) -> None:
    _run(machine_server, examples=200, steps=80)
