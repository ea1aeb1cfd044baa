"""The null engine keeps the engine's promises about blocks, so that what it proves of the protocol counts."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prelay_engine.sequence import Sequence
from prelay_queue.job import FinishReason, Sampling
from prelay_worker.config import NullModel
from prelay_worker.null import NullEngine, null_token

BLOCK, BLOCKS, SLOTS = 4, 10, 6


def blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


class EngineMachine(RuleBasedStateMachine):
    """A worker that does anything it may at any time, beside its own count of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = NullEngine(NullModel(step_ms=0), BLOCKS, BLOCK, SLOTS)
        self.count = 0
        self.copying: list[str] = []
        self.dropped: list[str] = []
        self.running: dict[str, Sequence] = {}
        self.held: list[str] = []

    def _sequence(self, prompt: int, ids: int, reserved: bool, priority: int) -> Sequence | None:
        self.count += 1
        sampling = Sampling(max_tokens=ids + 6)
        tokens = prompt + (sampling.max_tokens if reserved else ids)
        if not self.engine.room(tokens):
            return None
        return Sequence(
            f"j{self.count}@1", tuple(range(prompt)), sampling, list(range(ids)), priority, self.count, reserved
        )

    @rule(prompt=st.integers(1, 9), ids=st.integers(1, 4), reserved=st.booleans(), priority=st.integers(0, 2))
    def receive(self, prompt: int, ids: int, reserved: bool, priority: int) -> None:
        if sequence := self._sequence(prompt, ids, reserved, priority):
            self.engine.receive(sequence)
            self.copying.append(sequence.key)
            self.running[sequence.key] = sequence

    @rule(prompt=st.integers(1, 9), hand_over=st.booleans())
    def add(self, prompt: int, hand_over: bool) -> None:
        if sequence := self._sequence(prompt, 0, False, 1):
            sequence.hand_over = hand_over
            self.engine.add(sequence)
            self.running[sequence.key] = sequence

    @precondition(lambda self: self.copying)
    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.copying))
        self.copying.remove(key)
        self.engine.join(key)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.running)))
        before, gives = self.engine.spare, self.engine.gives(key)
        assert self.engine.drop(key)
        del self.running[key]
        if key in self.copying:
            self.copying.remove(key)
            self.dropped.append(key)
            assert self.engine.spare == before
        else:
            assert self.engine.spare == before + gives > before
        if key in self.held:
            self.held.remove(key)

    @precondition(lambda self: self.dropped)
    @rule()
    def copied(self) -> None:
        before = self.engine.stats().free
        self.engine.copied(self.dropped.pop())
        assert self.engine.stats().free > before

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        key = self.held.pop()
        self.engine.release(key)
        del self.running[key]

    @rule()
    def step(self) -> None:
        done = self.engine.step()
        for new in done.tokens:
            sequence = self.running[new.key]
            prefix = (*sequence.prompt_ids, *sequence.ids[: new.seq])
            assert new.token == null_token(prefix, None, 1000)
            assert new.key not in done.evicted
            if new.finish is not None:
                assert (new.finish, new.seq) == (FinishReason.LENGTH, sequence.sampling.max_tokens - 1)
                del self.running[new.key]
        for key in done.evicted:
            assert not self.running[key].reserved
            assert key not in self.copying
            assert key not in self.held
            del self.running[key]
        self.held.extend(done.held)

    @invariant()
    def every_block_is_free_or_of_a_live_sequence(self) -> None:
        stats = self.engine.stats()
        assert stats.orphaned == 0
        assert stats.free + stats.copying + stats.leased == stats.total == BLOCKS
        assert stats.free >= 0
        needed = sum(
            blocks(len(s.prompt_ids) + (s.sampling.max_tokens if s.reserved else len(s.ids) - (s.hand_over)))
            for s in self.running.values()
        )
        assert stats.total - stats.free >= needed - len(self.running)  # a last token has no KV yet


EngineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestEngineMachine = EngineMachine.TestCase


def test_the_chain_depends_on_every_token_before_and_in_divergent_mode_on_the_epoch() -> None:
    assert null_token((1, 2, 3), None, 10**9) == null_token((1, 2, 3), None, 10**9)
    others = {null_token(prefix, None, 10**9) for prefix in ((1, 2, 4), (2, 2, 3), (1, 2), (1, 2, 3, 0))}
    assert null_token((1, 2, 3), None, 10**9) not in others
    assert null_token((1, 2, 3), 1, 10**9) != null_token((1, 2, 3), 2, 10**9)


def test_a_pool_is_never_too_small_for_one_job_that_fits_alone() -> None:
    engine = NullEngine(NullModel(step_ms=0), BLOCKS, BLOCK, SLOTS)
    assert engine.fits(BLOCKS * BLOCK)
    assert not engine.fits(BLOCKS * BLOCK + 1)
    engine.add(Sequence("a@1", tuple(range(4)), Sampling(BLOCKS * BLOCK - 4)))
    steps = [engine.step() for _ in range(BLOCKS * BLOCK - 4)]
    assert not any(step.evicted for step in steps)
    assert steps[-1].tokens[0].finish is FinishReason.LENGTH
    assert engine.stats().free == BLOCKS
