"""Random histories of many jobs on a real server beside the double: both say and hold the same, and promises hold."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from prelay_queue.events import EndedEvent, decode_live
from prelay_queue.state import State
from tests.bed.double.data import INDEXES
from tests.bed.servers import KINDS, Server, running
from tests.integration.machine import machine_server, run_machine
from tests.integration.queue_accidents import Eventful
from tests.integration.queue_backend import Picture
from tests.integration.queue_desk import API, OTHER_API
from tests.integration.queue_history import HAPPENINGS, STAGES

__all__ = ["machine_server"]


class QueueMachine(RuleBasedStateMachine):
    """Lets things happen, and looks at all that stands after each."""

    server: Server

    def __init__(self) -> None:
        super().__init__()
        self.server.client.flushall()
        self.history = Eventful(self.server)
        self.pair = self.history.pair

    @initialize(data=st.data(), count=st.integers(1, 3))
    def some_jobs_come(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            self.history.submit(data)

    @rule(data=st.data())
    def something_happens(self, data: st.DataObject) -> None:
        can = [name for name, (weight, when) in HAPPENINGS.items() for _ in range(weight) if when(self.history)]
        getattr(self.history, data.draw(st.sampled_from(can), "what"))(data)

    # Promises.

    @invariant()
    def both_hold_the_same(self) -> None:
        self.history.picture = self.pair.compare()

    @invariant()
    def nobody_was_told_what_does_not_stand(self) -> None:
        for viewer in self.history.viewers if not self.history.rollbacks else ():
            assert viewer.end is None or "diverged" not in viewer.end.error
            job = self.pair.jobs[viewer.id]
            assert job.ids[: len(viewer.seen)] == viewer.seen

    @invariant()
    def a_job_ends_once(self) -> None:
        for api in (API, OTHER_API):
            events = [event for _, fields in self.history.live(api) for event in decode_live(fields["e"].encode())]
            ended = Counter(event.job for event in events if isinstance(event, EndedEvent))
            assert all(count == 1 for count in ended.values()), ended
            for name in ended:
                assert name not in self.pair.jobs or self.pair.jobs[name].state is State.DONE

    def teardown(self) -> None:
        """The world calms down: all jobs and viewers come to their end, and then nothing is left."""
        for _ in range(20):
            self.history.calm_down()
            if not self.history.watching and all(job.state is State.DONE for job in self.history.jobs):
                break
        else:
            raise AssertionError(f"no end: {self.history.watching} {self.history.jobs}")
        self.both_hold_the_same()
        self.nobody_was_told_what_does_not_stand()
        self.a_job_ends_once()
        for viewer in self.history.viewers:
            viewer.read()
            assert self.history.rollbacks or viewer.seen == self.pair.jobs[viewer.id].ids
        for stage in STAGES.values():
            self.history.claim_what_pends("P2", stage)
        for job in self.history.jobs:
            self.pair.each(lambda desk, job: desk.backend.forget(job), job.id)
        self.nothing_is_left(self.pair.compare())
        self.pair.real.close()

    def nothing_is_left(self, picture: Picture) -> None:
        assert not picture.jobs
        assert not picture.logs
        assert not picture.scores.keys() & set(INDEXES)
        assert not any(entries for stream, entries in picture.streams.items() if stream.startswith("work:"))
        assert not any(pending for pending, _ in picture.groups.values())


def test_random_histories_keep_the_promises(machine_server: Server) -> None:
    run_machine(QueueMachine, machine_server, examples=15, steps=40)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_many_long_random_histories_keep_the_promises(kind: str) -> None:
    for server in running(kind):
        server.client.config_set("appendonly", "no")
        run_machine(QueueMachine, server, examples=100, steps=80)
