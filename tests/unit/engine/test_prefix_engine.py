"""The engine with a prefix cache: less is computed, and every answer is what it is without."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from prelay_engine.blocks import BlockPool
from prelay_engine.config import EngineConfig
from prelay_engine.contiguous import ContiguousKv
from prelay_engine.engine import Engine
from prelay_engine.errors import NoRoom
from prelay_engine.kv import KvStore, PagedKv
from prelay_engine.model import Model
from prelay_engine.sequence import NewToken, Sequence
from prelay_queue.job import FinishReason, Sampling

from .conftest import LoadModel

BLOCK = 16
TEXT = torch.randint(3, 300, (200,), generator=torch.Generator().manual_seed(5)).tolist()
OTHER = torch.randint(3, 300, (200,), generator=torch.Generator().manual_seed(6)).tolist()
Make = Callable[..., KvStore]


def contiguous(model: Model, blocks: int = 64, prefix_cache: bool = True) -> ContiguousKv:
    return ContiguousKv(model.geometry, BlockPool(blocks), BLOCK, prefix_cache)


def paged(model: Model, blocks: int = 64, prefix_cache: bool = True) -> PagedKv:
    tensor = torch.full((blocks, *model.geometry.block_shape(BLOCK)), float("nan"), dtype=model.geometry.dtype)
    return PagedKv(model.geometry, BlockPool(blocks), BLOCK, tensor, prefix_cache)


@pytest.fixture(params=[paged, contiguous])
def make(request: pytest.FixtureRequest) -> Make:
    return request.param  # type: ignore[no-any-return]


def sequence(key: str, prompt: list[int], tokens: int = 6, **settings: object) -> Sequence:
    sampling = Sampling(max_tokens=tokens, temperature=1.0, seed=11, ignore_eos=True)
    return Sequence(f"{key}@1", tuple(prompt), sampling, **settings)  # type: ignore[arg-type]


def engine_on(model: Model, store: KvStore, **changes: int) -> Engine:
    config = EngineConfig(model=Path("tiny"), num_blocks=store.pool.size, prefill_chunk=24)
    return Engine(model, store, dataclasses.replace(config, **changes))  # type: ignore[arg-type]


def run(engine: Engine) -> list[NewToken]:
    tokens: list[NewToken] = []
    while engine.has_work:
        tokens += engine.step().tokens
        check(engine)
    return tokens


def check(engine: Engine) -> None:
    """Every block is somewhere, and memory of copies is held for cached and free blocks only."""
    store, stats = engine._kv, engine.stats()
    store.pool.check()
    assert stats.free + stats.copying + stats.leased + stats.cached == stats.total
    assert stats.orphaned == 0
    if isinstance(store, ContiguousKv):
        leased = {block for key in engine._entries for block in store.pool.blocks(key)}
        assert not store._copies.written & leased


def answer(engine: Engine, started: Sequence) -> tuple[list[int], int, int]:
    """Its ids, how many of its prompt's tokens were hits, and how many positions the engine computed for it."""
    before = engine.computed_tokens
    engine.add(dataclasses.replace(started, ids=[]))
    tokens = run(engine)
    assert [new.note.cached for new in tokens[1:]] == [0] * (len(tokens) - 1)
    assert not engine.stats().leased
    return [new.token for new in tokens], tokens[0].note.cached, engine.computed_tokens - before


def alone(model: Model, started: Sequence) -> list[int]:
    """What it says where nothing is cached."""
    return answer(engine_on(model, contiguous(model, prefix_cache=False)), started)[0]


def test_a_prompt_that_begins_like_one_before_computes_only_the_rest(tiny_model: LoadModel, make: Make) -> None:
    model = tiny_model("float32")
    engine = engine_on(model, make(model))
    first = sequence("a", TEXT[:80] + OTHER[:20])
    second = sequence("b", TEXT[:80] + OTHER[100:130])
    assert answer(engine, first) == (alone(model, first), 0, 105)
    assert answer(engine, second) == (alone(model, second), 80, 35)
    assert (engine.prefix_queries, engine.prefix_hits) == (210, 80)


def test_of_a_prompt_that_is_all_there_one_token_is_computed(tiny_model: LoadModel, make: Make) -> None:
    model = tiny_model("float32")
    engine, expected = engine_on(model, make(model)), {n: alone(model, sequence("x", TEXT[:n], 1)) for n in (64, 65)}
    assert answer(engine, sequence("a", TEXT[:65], 1)) == (expected[65], 0, 65)
    assert answer(engine, sequence("b", TEXT[:65], 1)) == (expected[65], 64, 1)
    assert answer(engine, sequence("c", TEXT[:64], 1)) == (expected[64], 48, 16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [7, 64])
def test_a_hit_that_ends_at_any_block_changes_no_bit(
    chunk: int, dtype: str, tiny_model: LoadModel, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits are compared, not only tokens: of all logits that the engine samples from."""
    model = tiny_model(dtype)
    rows: list[torch.Tensor] = []
    assert model.exact, model.exactness
    real = model.forward

    def noted(*args: object) -> torch.Tensor:
        logits = real(*args)  # type: ignore[arg-type]
        rows.extend(logits.clone().unbind(0))
        return logits

    monkeypatch.setattr(model, "forward", noted)
    for blocks in range(1, 9):
        prompt = TEXT[: blocks * BLOCK] + OTHER[:40]
        rows.clear()
        expected = alone(model, sequence("x", prompt))
        undisturbed = rows.copy()
        engine = engine_on(model, make(model), prefill_chunk=chunk)
        answer(engine, sequence("before", TEXT[: blocks * BLOCK + 1], 1))
        rows.clear()
        assert answer(engine, sequence("a", prompt))[:2] == (expected, blocks * BLOCK)
        assert all(map(torch.equal, rows, undisturbed))
        assert len(rows) == len(undisturbed)


def test_the_answer_of_one_turn_is_a_hit_of_the_next(tiny_model: LoadModel, make: Make) -> None:
    model = tiny_model("float32")
    engine = engine_on(model, make(model))
    ids, _, _ = answer(engine, sequence("a", TEXT[:30], 40))
    turn = sequence("b", [*TEXT[:30], *ids, *OTHER[:10]])
    assert answer(engine, turn) == (alone(model, turn), 64, 16 + 5)


def test_of_two_that_come_together_the_second_has_what_the_first_computes(tiny_model: LoadModel, make: Make) -> None:
    model = tiny_model("float32")
    engine = engine_on(model, make(model))
    started = [sequence(key, TEXT[:70] + OTHER[n : n + 5], arrival_ms=n) for n, key in enumerate("abc")]
    expected = [alone(model, each) for each in started]
    for each in started:
        engine.add(each)
    tokens = run(engine)
    assert [each.ids for each in started] == expected
    assert [new.note.cached for new in tokens if new.seq == 0] == [0, 64, 64]
    assert engine.computed_tokens == 75 + 2 * 11 + 3 * 5


def test_what_is_cached_makes_room_before_anybody_is_evicted(tiny_model: LoadModel, make: Make) -> None:
    model = tiny_model("float32")
    engine = engine_on(model, make(model, blocks=8))
    answer(engine, sequence("a", TEXT[:113], 1))
    assert engine.stats().cached == 7
    assert engine.room(8 * BLOCK - BLOCK)
    started = [sequence(key, OTHER[n : n + 20], 40, arrival_ms=n) for n, key in enumerate("bc")]
    expected = [alone(model, each) for each in started]
    for each in started:
        engine.add(each)
    while engine.has_work:
        assert not engine.step().evicted
        check(engine)
    assert [each.ids for each in started] == expected


def test_an_evicted_sequence_comes_back_to_what_it_had_and_to_the_same_answer(
    tiny_model: LoadModel, make: Make
) -> None:
    model = tiny_model("float32")
    engine = engine_on(model, make(model, blocks=8))
    urgent = sequence("a", TEXT[:50], 60, priority=0)
    victim = sequence("b", OTHER[:50], 30, priority=1)
    expected = [alone(model, each) for each in (urgent, victim)]
    engine.add(urgent)
    engine.add(victim)
    evicted: list[str] = []
    while not evicted:
        evicted += engine.step().evicted
    check(engine)
    assert evicted == ["b@1"]
    assert engine.drop("a@1")
    known, before = victim.tokens, engine.computed_tokens
    again = dataclasses.replace(victim, key="b@2")
    engine.add(again)
    ahead = known - engine._entries["b@2"].computed
    tokens = run(engine)
    assert again.ids == expected[1]
    assert tokens[0].note.cached == 0, "what the first attempt found is what its client was told"
    assert ahead <= 2 * BLOCK
    assert engine.computed_tokens - before == ahead + len(tokens) - 1


def test_a_shared_block_outlives_one_of_its_holders(tiny_model: LoadModel) -> None:
    model = tiny_model("float32")
    store = paged(model)
    engine = engine_on(model, store)
    answer(engine, sequence("before", TEXT[:65], 1))
    one, two = sequence("a", TEXT[:64] + OTHER[:9]), sequence("b", TEXT[:64] + OTHER[50:70])
    expected = alone(model, two)
    engine.add(one)
    engine.add(two)
    assert store.pool.blocks("a@1")[:4] == store.pool.blocks("b@1")[:4]
    assert engine.stats().leased == 4 + 1 + 2
    assert engine.gives("a@1") == 2
    engine.step()
    assert engine.drop("a@1")
    check(engine)
    assert engine.stats().leased == 4 + 2
    engine.add(sequence("c", OTHER[:190], 1))  # whatever it is given, it is not what b holds
    run(engine)
    assert two.ids == expected


def test_a_held_sequence_shares_its_blocks_and_a_release_drops_only_its_own_hold(tiny_model: LoadModel) -> None:
    model = tiny_model("float32")
    store = paged(model, blocks=12)
    engine = engine_on(model, store)
    for key in "ab":
        engine.add(sequence(key, TEXT[:70], hand_over=True))
        run(engine)
    first, second = store.export("a@1"), store.export("b@1")
    assert first[0][:4] == second[0][:4]
    assert first[1][:4] == second[1][:4] == [1] * 4
    content = store.tensor[first[0][:4]].clone()
    engine.release("a@1")
    engine.add(sequence("c", OTHER[:100], 1))
    run(engine)
    assert store.export("b@1") == second, "nobody was given what an importer may read"
    assert torch.equal(store.tensor[second[0][:4]], content)
    engine.release("b@1")
    check(engine)
    engine.add(sequence("d", OTHER[100:], 1))
    engine.add(sequence("e", TEXT[100:180], 1))
    run(engine)
    assert [int(store.pool.generations[block]) for block in second[0]] != second[1], "and now an importer would know"


def test_broken_numbers_are_found_by_nobody(tiny_model: LoadModel, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("float32")
    engine, real = engine_on(model, make(model)), model.forward
    expected = alone(model, sequence("x", TEXT[:40]))

    def poisoned(store: KvStore, *args: object) -> torch.Tensor:
        logits = real(store, *args).clone()  # type: ignore[arg-type]
        return logits.fill_(float("nan"))

    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", poisoned)
        engine.add(sequence("a", TEXT[:40]))
        assert [new.finish for new in run(engine)] == [FinishReason.ERROR]
    assert engine.stats().cached == 0
    assert answer(engine, sequence("b", TEXT[:40])) == (expected, 0, 45)


def test_a_prompt_whose_own_tokens_are_asked_about_is_computed_whole_and_serves_others(
    tiny_model: LoadModel, make: Make
) -> None:
    model = tiny_model("float32")
    engine = engine_on(model, make(model))
    answer(engine, sequence("a", TEXT[:65], 1))
    started = sequence("b", TEXT[:90], 1)
    started.sampling = dataclasses.replace(started.sampling, prompt_logprobs=0)
    assert answer(engine, started)[1:] == (0, 90)
    assert answer(engine, sequence("c", TEXT[:90], 1))[1:] == (80, 10)


def test_without_a_cache_nothing_is_kept(tiny_model: LoadModel, make: Make) -> None:
    model = tiny_model("float32")
    engine = engine_on(model, make(model, prefix_cache=False))
    for key in "ab":
        assert answer(engine, sequence(key, TEXT[:65], 1))[1:] == (0, 65)
    assert (engine.prefix_queries, engine.prefix_hits, engine.stats().free) == (0, 0, 64)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_any_history_of_a_small_pool_gives_every_answer_unchanged(seed: int, tiny_model: LoadModel, make: Make) -> None:
    """Prompts that begin alike come, are evicted, cancelled and come back, in a pool for two or three of them."""
    model, draw = tiny_model("float32"), random.Random(seed)
    engine = engine_on(model, make(model, blocks=9), prefill_chunk=draw.choice((5, 24, 100)))
    waiting: list[Sequence] = []
    for number in range(14):
        beginning = draw.choice((TEXT, OTHER))[: draw.choice((16, 30, 32, 48, 65))]
        prompt = beginning + draw.choice((TEXT, OTHER))[100 : 100 + draw.randint(1, 20)]
        waiting.append(sequence(f"{number}", prompt, draw.randint(1, 30), arrival_ms=number))
    expected = {each.key: alone(model, each) for each in waiting}
    every, evictions, drops = {each.key: each for each in waiting}, 0, 0
    while waiting or engine.has_work:
        with suppress(NoRoom):
            while waiting:
                engine.add(waiting[0])
                del waiting[0]
        step = engine.step()
        check(engine)
        back = list(step.evicted)
        evictions += len(back)
        running = sorted(key for key in engine._entries)
        if running and draw.random() < 0.05:
            back.append(draw.choice(running))
            assert engine.drop(back[-1])
            drops += 1
        for key in back:
            every[key] = dataclasses.replace(every[key])
            waiting.append(every[key])
    assert {key: each.ids for key, each in every.items()} == expected
    assert min(evictions, drops, engine.prefix_hits) > 0
    assert engine.stats().free + engine.stats().cached == 9
