"""Random histories of batches on a real server beside a small model: what is answered, and what then stands."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from prelay_queue.batches import BatchProgress, BatchScripts, BatchStatus, Kept
from prelay_queue.client import SyncQueue
from prelay_queue.scripts import text
from tests.bed.servers import Server
from tests.integration.machine import machine_server, run_machine

__all__ = ["machine_server"]

BATCHES, OWNERS = ("batch_a", "batch_b"), ("r1", "r2", "r3")
LEASE_MS = 10_000_000
NOTHING = BatchProgress()
ORDER = [BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING]
batches, owners, epochs = st.sampled_from(BATCHES), st.sampled_from(OWNERS), st.integers(0, 6)
ends = st.sampled_from([status for status in BatchStatus if status.over])


@dataclass
class Modelled:
    """One batch, as it should be."""

    epoch: int
    status: BatchStatus = BatchStatus.VALIDATING
    owner: str = ""
    leased: bool = False
    cancel: bool = False
    progress: BatchProgress = NOTHING

    def refuses(self, epoch: int, owner: str) -> str:
        if self.status.over:
            return "over"
        return "" if (self.epoch, self.owner) == (epoch, owner) else "fenced"


class BatchMachine(RuleBasedStateMachine):
    """The API opens and cancels, runners take, keep and end, also those that lost it; leases end; Redis forgets."""

    server: Server

    def __init__(self) -> None:
        super().__init__()
        self.server.client.flushall()
        self.queue = SyncQueue(self.server.settings())
        self.scripts = BatchScripts(self.queue.keys)
        self.model: dict[str, Modelled] = {}
        self.given: dict[str, int] = dict.fromkeys(BATCHES, 0)  # the highest epoch that a runner ever had
        self.count = 0

    def teardown(self) -> None:
        self.queue.close()

    def some_progress(self) -> BatchProgress:
        self.count += 1
        return BatchProgress(self.count, self.count, 0, self.count, self.count)

    @initialize()
    def one_begins(self) -> None:
        self.opens(BATCHES[0])

    @rule(batch=batches)
    def opens(self, batch: str) -> None:
        """Also one that Redis forgot: the disk knows which epochs there were."""
        answer = self.queue.run(self.scripts.open(batch, b"{}", 1000, self.given[batch]))
        assert answer == ("exists" if batch in self.model else "new")
        self.model.setdefault(batch, Modelled(self.given[batch]))

    @rule(batch=batches, owner=owners, twice=st.booleans())
    def takes(self, batch: str, owner: str, twice: bool) -> None:
        found = self.model.get(batch)
        for _ in range(1 + twice):
            taken = self.queue.run(self.scripts.take(batch, owner, LEASE_MS))
            if found is None or found.status.over:
                assert taken.code == ("over" if found else "gone")
            elif found.leased and found.owner != owner:
                assert taken.code == "held"
                assert 0 < taken.wait_ms <= LEASE_MS
            else:
                found.epoch += found.owner != owner
                found.owner, found.leased = owner, True
                assert (taken.code, taken.epoch) == ("ok", found.epoch)
                assert taken.epoch >= self.given[batch], "epochs only grow"
                self.given[batch] = taken.epoch

    @rule(batch=batches, owner=owners, epoch=epochs, current=st.booleans(), status=st.sampled_from(ORDER[:3]))
    def keeps(self, batch: str, owner: str, epoch: int, current: bool, status: BatchStatus) -> None:
        found, progress = self.model.get(batch), self.some_progress()
        if found and current and found.owner:
            epoch, owner = found.epoch, found.owner
        kept = self.queue.run(self.scripts.keep(batch, epoch, owner, LEASE_MS, status, progress))
        no = found.refuses(epoch, owner) if found else "gone"
        if no or found is None:
            assert kept == Kept(no)
        else:
            assert (kept.code, kept.cancel) == ("ok", found.cancel)
            found.progress, found.leased = progress, True
            found.status = max(found.status, status, key=ORDER.index)

    @rule(batch=batches, owner=owners, epoch=epochs, current=st.booleans(), status=ends, twice=st.booleans())
    def ends(self, batch: str, owner: str, epoch: int, current: bool, status: BatchStatus, twice: bool) -> None:
        found, progress = self.model.get(batch), self.some_progress()
        if found and current and found.owner:
            epoch, owner = found.epoch, found.owner
        for _ in range(1 + twice):
            answer = self.queue.run(self.scripts.end(batch, epoch, owner, status, progress))
            if found is None:
                assert answer == "gone"
            elif found.status.over and (found.epoch, found.owner, found.status) == (epoch, owner, status):
                assert answer == "ok", "a repeat"
            elif no := found.refuses(epoch, owner):
                assert answer == no
            else:
                assert answer == "ok"
                found.status, found.progress, found.leased = status, progress, False

    @rule(batch=batches)
    def cancels(self, batch: str) -> None:
        found, answer = self.model.get(batch), self.queue.run(self.scripts.cancel(batch))
        if found is None:
            assert answer == "gone"
        else:
            if not found.status.over:
                found.status, found.cancel = BatchStatus.CANCELLING, True
            assert answer == found.status

    @rule(batch=batches)
    def lease_ends(self, batch: str) -> None:
        """Its runner died, was frozen or cut off."""
        if batch in self.model and self.model[batch].leased:
            self.queue.redis.hset(self.queue.keys.batch(batch), "lease", 1)
            self.model[batch].leased = False

    @rule(batch=batches)
    def redis_forgets(self, batch: str) -> None:
        self.queue.redis.delete(self.queue.keys.batch(batch))
        self.model.pop(batch, None)
        self.queue.run(self.scripts.stale(0, 10))

    @rule()
    def index_is_lost(self) -> None:
        self.queue.redis.delete(self.queue.keys.batches)
        for batch in self.model:
            self.queue.run(self.scripts.open(batch, b"", 0))

    @invariant()
    def what_stands_is_what_should(self) -> None:
        for batch in BATCHES:
            found, state = self.model.get(batch), self.queue.run(self.scripts.look(batch))
            if found is None or state is None:
                assert found is None
                assert state is None
                continue
            assert (state.status, state.epoch, state.owner, state.cancel, state.progress, state.lease_left_ms > 0) == (
                found.status, found.epoch, found.owner, found.cancel, found.progress, found.leased,
            )  # fmt: skip
            assert (state.ended_ms > 0) is found.status.over

    @invariant()
    def the_index_has_those_that_are_not_over(self) -> None:
        listed = self.queue.redis.zrange(self.queue.keys.batches, 0, -1)
        open_ = {batch for batch, found in self.model.items() if not found.status.over}
        assert {text(each) for each in listed} == open_
        stale = self.queue.run(self.scripts.stale(-1000, 10))
        assert set(stale) == {batch for batch in open_ if not self.model[batch].leased}


def test_random_histories_of_batches_keep_the_promises(machine_server: Server) -> None:
    run_machine(BatchMachine, machine_server, examples=40, steps=30)


@pytest.mark.slow
def test_many_random_histories_of_batches_keep_the_promises(machine_server: Server) -> None:
    run_machine(BatchMachine, machine_server, examples=120, steps=50)
