from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prelay_engine.blocks import BlockPool, BlockState
from prelay_engine.errors import NoRoom, UnknownSequence

SIZE = 12
OWNERS = st.sampled_from(["a", "b", "c", "d"])


class PoolMachine(RuleBasedStateMachine):
    """Any history of calls leaves every block with exactly one owner, and a reuse never goes unnoticed.

    Nothing is shared here: see test_prefix.py.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(SIZE)
        self.owned: dict[str, list[int]] = {}
        self.states: dict[str, BlockState] = {}
        self.handed_out = [0] * SIZE

    @rule(owner=OWNERS, count=st.integers(0, SIZE + 1), state=st.sampled_from(BlockState))
    def take(self, owner: str, count: int, state: BlockState) -> None:
        free = self.pool.free
        if self._too_late(owner, state):
            with pytest.raises(UnknownSequence, match="nothing is copied"):
                self.pool.take(owner, count, state)
            return
        if count > free:
            with pytest.raises(NoRoom):
                self.pool.take(owner, count, state)
            assert self.pool.free == free
            return
        taken = self.pool.take(owner, count, state)
        assert len(taken) == count
        self.owned.setdefault(owner, []).extend(taken)
        self.states[owner] = state
        for block in taken:
            self.handed_out[block] += 1

    @rule(owner=OWNERS, state=st.sampled_from(BlockState))
    def move(self, owner: str, state: BlockState) -> None:
        if owner in self.owned and not self._too_late(owner, state):
            self.pool.move(owner, state)
            self.states[owner] = state
        else:
            with pytest.raises(UnknownSequence):
                self.pool.move(owner, state)

    def _too_late(self, owner: str, state: BlockState) -> bool:
        """What was written or shared once is not copied into."""
        return state is BlockState.COPYING is not self.states.get(owner, BlockState.COPYING)

    @rule(owner=OWNERS)
    def give_back(self, owner: str) -> None:
        if self.states.get(owner) in (None, BlockState.COPYING):
            with pytest.raises(UnknownSequence):
                self.pool.give_back(owner)
            return
        self.pool.give_back(owner)
        del self.owned[owner], self.states[owner]

    @invariant()
    def every_block_is_free_or_owned_once(self) -> None:
        self.pool.check()
        for owner, blocks in self.owned.items():
            assert self.pool.blocks(owner) == tuple(blocks)
        assert self.pool.free == SIZE - sum(map(len, self.owned.values()))

    @invariant()
    def a_generation_counts_how_often_its_block_was_handed_out(self) -> None:
        assert self.pool.generations.tolist() == self.handed_out

    @invariant()
    def the_figures_add_up(self) -> None:
        stats = self.pool.stats({"a", "b"})
        assert stats.free + stats.copying + stats.leased + stats.cached == stats.total == SIZE
        assert stats.copying == sum(
            len(blocks) for owner, blocks in self.owned.items() if self.states[owner] is BlockState.COPYING
        )
        assert stats.orphaned == sum(len(self.owned.get(owner, ())) for owner in "cd")


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_generations_are_raised_in_the_callers_array_before_the_block_is_known() -> None:
    shared = np.array([7, 7, 7], dtype=np.uint64)
    pool = BlockPool(3, shared)
    taken = pool.take("a", 2)
    assert all(shared[block] == 8 for block in taken)
    assert sorted(shared.tolist()) == [7, 8, 8]


def test_a_table_of_another_size_or_type_is_refused() -> None:
    with pytest.raises(ValueError, match="uint64"):
        BlockPool(3, np.zeros(3, dtype=np.int64))
    with pytest.raises(ValueError, match="shape"):
        BlockPool(3, np.zeros(4, dtype=np.uint64))


def test_check_finds_a_block_that_was_lost() -> None:
    pool = BlockPool(3)
    pool._free.pop()
    with pytest.raises(AssertionError, match="lost or doubled"):
        pool.check()
