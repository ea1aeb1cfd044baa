"""The prefix cache as bookkeeping: which block is found under which ids, and which one goes when room is needed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prelay_engine.blocks import BlockPool, BlockState
from prelay_engine.errors import NoRoom, UnknownSequence
from prelay_engine.prefix import Chain, PrefixTable

SIZE, BLOCK = 12, 2
#: Few different ids, so that most texts begin like others.
TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=11).map(tuple)
Ids = tuple[int, ...]


def chain_of(ids: Ids, salt: bytes = b"") -> Chain:
    return Chain(lambda start, count: ids[start : start + count], BLOCK, salt)


def names(ids: Ids, count: int) -> list[bytes]:
    chain = chain_of(ids)
    return [chain[index] for index in range(count)]


def begun(ids: Ids, index: int) -> Ids:
    """All ids up to the end of a block."""
    return ids[: (index + 1) * BLOCK]


@dataclass
class Held:
    """A sequence: `done` of its ids are computed."""

    ids: Ids
    blocks: list[int]
    done: int = 0
    copying: bool = False


class CacheMachine(RuleBasedStateMachine):
    """Sequences over one pool, beside a memory that knows what was last written into each block."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(SIZE)
        self.held: dict[str, Held] = {}
        self.memory: dict[int, Ids | None] = dict.fromkeys(range(SIZE))
        self.texts: dict[bytes, Ids] = {}  # what each name stands for
        self.count = 0

    def _learn(self, ids: Ids) -> None:
        for index, name in enumerate(names(ids, len(ids) // BLOCK)):
            assert self.texts.setdefault(name, begun(ids, index)) == begun(ids, index)

    def _find(self, ids: Ids, limit: int) -> list[int]:
        """What the pool finds, which must hold these very ids, and must be all that stands without a gap."""
        self._learn(ids)
        found = self.pool.match(names(ids, limit))
        for index, block in enumerate(found):
            assert self.memory[block] == begun(ids, index)
        return found

    def _take(
        self, key: str, count: int, state: BlockState = BlockState.IN_USE, shared: list[int] | None = None
    ) -> bool:
        """Take if that must be possible: cached blocks count as free ones, those that are to be shared do not."""
        before, generations = self.pool.stats(self.held), self.pool.generations.copy()
        shared = shared or []
        busy = {block for sequence in self.held.values() for block in sequence.blocks}
        if count > before.available - len(set(shared) - busy):
            with pytest.raises(NoRoom):
                self.pool.take(key, count, state, shared)
            assert self.pool.stats(self.held) == before
            return False
        taken = self.pool.take(key, count, state, shared)
        assert not set(taken) & (busy | set(shared))
        for block in range(SIZE):
            assert self.pool.generations[block] == generations[block] + (block in taken)
        self.memory.update(dict.fromkeys(taken))
        sequence = self.held.setdefault(key, Held((), []))
        sequence.blocks += [*shared, *taken]
        return True

    @rule(ids=TEXTS)
    def open(self, ids: Ids) -> None:
        self.count += 1
        shared = self._find(ids, (len(ids) - 1) // BLOCK)
        if self._take(f"s{self.count}", -(-len(ids) // BLOCK) - len(shared), shared=shared):
            sequence = self.held[f"s{self.count}"]
            sequence.ids, sequence.done = ids, len(shared) * BLOCK
            assert sequence.done < len(ids), "one token is always computed"

    @rule(count=st.integers(1, 4))
    def receive(self, count: int) -> None:
        self.count += 1
        if self._take(f"c{self.count}", count, BlockState.COPYING):
            self.held[f"c{self.count}"].copying = True

    def _some(self, data: st.DataObject, copying: bool = False) -> str | None:
        keys = sorted(key for key, sequence in self.held.items() if sequence.copying is copying)
        return data.draw(st.sampled_from(keys)) if keys else None

    @rule(data=st.data(), count=st.integers(1, 5))
    def compute(self, data: st.DataObject, count: int) -> None:
        if (key := self._some(data)) is None:
            return
        sequence = self.held[key]
        stop = min(len(sequence.ids), sequence.done + count)
        for index in range(sequence.done // BLOCK, -(-stop // BLOCK)):
            block = sequence.blocks[index]
            holders = [other for other in self.held.values() if block in other.blocks]
            assert holders == [sequence], "what is shared is not written"
            assert self.memory[block] is None, "what has a name is not written"
        for index in range(sequence.done // BLOCK, stop // BLOCK):
            self.memory[sequence.blocks[index]] = begun(sequence.ids, index)
            self.pool.name(key, index, names(sequence.ids, index + 1)[index])
        sequence.done = stop

    @rule(data=st.data())
    def skip_what_others_computed(self, data: st.DataObject) -> None:
        if (key := self._some(data)) is None:
            return
        sequence = self.held[key]
        index = sequence.done // BLOCK
        if index >= (len(sequence.ids) - 1) // BLOCK:
            return
        found = self._find(sequence.ids, index + 1)[index:]
        whole = self.pool.match([names(sequence.ids, index + 1)[index]])
        assert self.pool.share(key, index, names(sequence.ids, index + 1)[index]) is bool(whole)
        assert not found or found == whole
        if whole:
            assert self.memory[whole[0]] == begun(sequence.ids, index)
            sequence.blocks[index] = whole[0]
            sequence.done = (index + 1) * BLOCK

    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        key = self._some(data)
        if key is None or self.held[key].done < len(self.held[key].ids):
            return
        sequence = self.held[key]
        ids = (*sequence.ids, token)
        if len(ids) <= len(sequence.blocks) * BLOCK or self._take(key, 1):
            sequence.ids = ids
            self._learn(ids)

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if (key := self._some(data)) is None:
            return
        available, alone = self.pool.available, self.pool.alone(key)
        self.pool.give_back(key)
        del self.held[key]
        assert self.pool.available == available + alone

    @rule(data=st.data())
    def end_the_copy(self, data: st.DataObject) -> None:
        if (key := self._some(data, copying=True)) is None:
            return
        with pytest.raises(UnknownSequence):
            self.pool.give_back(key)
        with pytest.raises(UnknownSequence):
            self.pool.name(key, 0, b"name")
        self.pool.move(key, BlockState.IN_USE)
        self.pool.give_back(key)
        del self.held[key]

    @rule(ids=TEXTS)
    def keep_a_copy(self, ids: Ids) -> None:
        self._learn(ids)
        for index, name in enumerate(names(ids, len(ids) // BLOCK)):
            known, available = self.pool.match([name]), self.pool.available
            block = self.pool.keep(name)
            assert (block is None) == bool(known or not available)
            if block is not None:
                assert not any(block in sequence.blocks for sequence in self.held.values())
                self.memory[block] = begun(ids, index)

    @rule(ids=TEXTS)
    def retract(self, ids: Ids) -> None:
        self.pool.retract(names(ids, len(ids) // BLOCK))
        assert not self.pool.match(names(ids, len(ids) // BLOCK))

    @precondition(lambda self: self.pool.stats(()).cached)
    @rule()
    def fill_up(self) -> None:
        """Whatever is cached makes room, down to the last block, and nothing of it is found then."""
        assert self._take("all", self.pool.available)
        assert self.pool.available == self.pool.stats(self.held).cached == 0
        self.pool.give_back("all")
        del self.held["all"]

    @invariant()
    def each_block_is_free_cached_or_held(self) -> None:
        self.pool.check()
        for key, sequence in self.held.items():
            assert self.pool.blocks(key) == tuple(sequence.blocks)
        stats = self.pool.stats(self.held)
        copying = sum(len(sequence.blocks) for sequence in self.held.values() if sequence.copying)
        held = {block for sequence in self.held.values() for block in sequence.blocks}
        assert stats.total == stats.free + stats.copying + stats.leased + stats.cached == SIZE
        assert (stats.copying, stats.leased + stats.copying, stats.orphaned) == (copying, len(held), 0)
        assert self.pool.stats(()).orphaned == len(held)

    @invariant()
    def a_name_says_what_its_block_holds(self) -> None:
        for name, ids in self.texts.items():
            for block in self.pool.match([name]):
                assert self.memory[block] == ids


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase


def test_a_name_depends_on_every_id_before_and_on_the_salt() -> None:
    ids = (1, 2, 3, 4, 5, 6)
    name = names(ids, 3)[2]
    assert names((*ids, 7), 3)[2] == name
    others = {names((9, *ids[1:]), 3)[2], names((*ids[:5], 9), 3)[2], names((*ids, *ids), 6)[5], chain_of(ids, b"x")[2]}
    assert name not in others
    assert len(others) == 4


def test_names_are_the_same_in_every_process() -> None:
    assert names((1, 2), 1)[0].hex() == "377fee8dde4dc523912ee598c2a5f920f268c47ce236eec36b8d54d11077cf9a"


def test_only_a_full_block_has_a_name() -> None:
    with pytest.raises(AssertionError, match="full block"):
        chain_of((1, 2, 3))[1]


def filled(pool: BlockPool, key: str, ids: Ids) -> None:
    """A sequence comes, is computed and goes."""
    shared = pool.match(names(ids, (len(ids) - 1) // BLOCK))
    pool.take(key, -(-len(ids) // BLOCK) - len(shared), shared=shared)
    for index, name in enumerate(names(ids, len(ids) // BLOCK)):
        pool.name(key, index, name)
    pool.give_back(key)


def test_the_least_recently_used_text_goes_first_and_of_a_text_its_end() -> None:
    pool, old, new = BlockPool(8), (1, 1, 1, 1, 1, 1), (2, 2, 2, 2, 2, 2)
    filled(pool, "old", old)
    filled(pool, "new", new)
    filled(pool, "old again", old)
    assert (pool.free, pool.available) == (2, 8)

    def standing(ids: Ids) -> int:
        return len(pool.match(names(ids, 3)))

    seen = []
    for count in range(1, 9):
        pool.take("other", 1)
        seen.append((standing(new), standing(old)))
        assert pool.count("other") == count
    assert seen == [(3, 3), (3, 3), (2, 3), (1, 3), (0, 3), (0, 2), (0, 1), (0, 0)]


def test_a_text_that_goes_on_never_takes_its_own_beginning_for_the_rest() -> None:
    pool, old = BlockPool(4), (1, 1, 1, 1, 1, 1, 1)
    filled(pool, "old", old[:4])
    filled(pool, "new", (2, 2, 2, 2))
    shared = pool.match(names(old, 3))
    assert (len(shared), pool.free) == (2, 0)
    taken = pool.take("old again", 2, shared=shared)
    assert not set(taken) & set(shared)
    assert pool.match(names(old, 2)) == shared


def test_a_block_that_two_hold_stays_when_one_of_them_goes_and_is_cached_when_both_have() -> None:
    pool, ids = BlockPool(6), (1, 2, 3, 4, 5)
    filled(pool, "first", ids)
    for key in ("a", "b"):
        pool.take(key, 1, shared=pool.match(names(ids, 2)))
    assert pool.stats({"a", "b"}).leased == 4
    assert pool.blocks("a")[:2] == pool.blocks("b")[:2]
    pool.give_back("a")
    assert pool.stats({"b"}).leased == 3
    with pytest.raises(NoRoom):
        pool.take("c", 4)
    pool.give_back("b")
    assert pool.stats(()) == pool.stats({"x"})
    assert (pool.stats(()).cached, pool.free) == (2, 4)


def test_a_block_that_an_orphan_and_a_live_owner_hold_is_no_orphan() -> None:
    pool, ids = BlockPool(6), (1, 2, 3, 4, 5)
    filled(pool, "first", ids)
    for key in ("a", "b"):
        pool.take(key, 1, shared=pool.match(names(ids, 2)))
    assert pool.stats({"a"}).orphaned == 1
    assert pool.stats({"a", "b"}).orphaned == 0
    assert pool.stats(()).orphaned == 4


def test_shared_blocks_come_first_or_not_at_all() -> None:
    pool = BlockPool(6)
    filled(pool, "first", (1, 2, 3))
    pool.take("a", 1)
    with pytest.raises(ValueError, match="shared ones come first"):
        pool.take("a", 1, shared=pool.match(names((1, 2), 1)))


def test_check_finds_a_holder_that_was_not_counted() -> None:
    pool = BlockPool(3)
    pool.take("a", 1)
    pool._holders[pool.blocks("a")[0]] = 2
    with pytest.raises(AssertionError, match="miscounted"):
        pool.check()


def test_a_table_names_a_block_once_and_a_name_means_one_block() -> None:
    table = PrefixTable()
    assert table.add(b"one", 1)
    assert not table.add(b"one", 2)
    with pytest.raises(AssertionError, match="named once"):
        table.add(b"two", 1)
    table.set_idle(1)
    assert repr(table) == "<PrefixTable 1 blocks, 1 idle>"
    assert table.evict() == 1
    assert table.find(b"one") is None
    assert (len(table), table.idle) == (0, 0)
