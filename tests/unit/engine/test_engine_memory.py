"""Steps that run out of memory: what `shrink` decides, and that an engine gets on with its work whatever fails."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from collections.abc import Sequence as Rows
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prelay_engine.attention import Span
from prelay_engine.blocks import BlockPool
from prelay_engine.config import EngineConfig
from prelay_engine.engine import Engine
from prelay_engine.errors import NoRoom, OutOfMemory
from prelay_engine.geometry import Geometry
from prelay_engine.kv import KvStore, PagedKv
from prelay_engine.model import Computed, Model
from prelay_engine.sampler import Draw
from prelay_engine.scheduler import Chunk, Limits, Plan, Row, schedule
from prelay_engine.sequence import NewToken, Sequence
from prelay_engine.shrink import NO_MEMORY, RECOVERS_AFTER, Remedy, Shrink
from prelay_queue.job import FinishReason, Sampling

from .conftest import LoadModel, contiguous, paged

BLOCK, CHUNK = 4, 32
#: As a worker does, which then gives a job all it needs at admission.
MAX_PREEMPTIONS = 2


def row(key: str, *, priority: int = 1, arrival: int = 0, reserved: bool = False, todo: int = 0) -> Row:
    return Row(key, priority, arrival, reserved, todo, 0, 1)


# What is decided


def test_prompt_tokens_are_halved_down_to_a_block_before_anybody_goes() -> None:
    shrink = Shrink(CHUNK, 8, BLOCK)
    rows = [row("a"), row("p", todo=100)]
    seen = []
    for _ in range(4):
        plan = schedule(rows, 0, shrink.limits(Limits(CHUNK)))
        seen.append(plan.chunks[0].tokens)
        remedy = shrink.failed(rows, plan)
    assert seen == [32, 16, 8, 4]
    assert remedy == Remedy(evicted="p")


def test_it_is_what_the_step_had_that_is_halved_and_not_what_it_might_have_had() -> None:
    shrink = Shrink(512, 8, BLOCK)
    assert shrink.failed([row("p", todo=20)], Plan(chunks=(Chunk("p", 20),))) == Remedy()
    assert shrink.limits(Limits(512)).tokens == 10


def test_the_least_urgent_of_those_that_ran_is_evicted_and_no_reserved_one() -> None:
    rows = [
        row("urgent", priority=0, arrival=9),
        row("kept", priority=2, reserved=True),
        row("early", priority=2, arrival=1),
        row("late", priority=2, arrival=2),
        row("paused", priority=2, arrival=3),
    ]
    ran = ["urgent", "kept", "early", "late"]
    shrink = Shrink(CHUNK, 8, BLOCK)
    evicted = []
    while len(ran) > 1:
        remedy = shrink.failed(rows, Plan(tuple(ran)))
        assert remedy.evicted is not None
        evicted.append(remedy.evicted)
        ran.remove(remedy.evicted)
        assert shrink.limits(Limits(CHUNK)).rows == len(ran), "nobody comes into its place"
    assert evicted == ["late", "early", "urgent"]
    assert shrink.failed(rows, Plan(("kept",))) == Remedy(ended="kept")


def test_of_reserved_rows_half_go_on_and_the_others_wait() -> None:
    rows = [row(f"r{number}", arrival=number, reserved=True) for number in range(5)]
    shrink = Shrink(CHUNK, 8, BLOCK)
    assert shrink.failed(rows, Plan(tuple(each.key for each in rows))) == Remedy()
    plan = schedule(rows, 0, shrink.limits(Limits(CHUNK)))
    assert plan == Plan(("r0", "r1"))
    assert shrink.failed(rows, plan) == Remedy()
    assert schedule(rows, 0, shrink.limits(Limits(CHUNK))) == Plan(("r0",))


def test_the_limits_double_after_so_many_good_steps_in_a_row_and_end_where_they_began() -> None:
    shrink = Shrink(CHUNK, 8, BLOCK)
    limits = Limits(CHUNK, 8, 4, 6)
    assert shrink.limits(limits) == limits
    shrink.failed([row("a"), row("b")], Plan(("a", "b")))
    shrink.failed([row("p", todo=8)], Plan(chunks=(Chunk("p", 8),)))
    assert repr(shrink) == "Shrink(tokens=4/32, rows=1/8)"
    assert shrink.limits(limits) == Limits(4, 8, 4, 2, 1), "half is left to who is urgent"
    for _ in range(RECOVERS_AFTER - 1):
        shrink.ran()
    shrink.failed([row("p", todo=8)], Plan(chunks=(Chunk("p", 8),)))
    for doubled in (4, 8, 16, 32):
        assert shrink.limits(Limits(CHUNK)).tokens == doubled
        for _ in range(RECOVERS_AFTER):
            shrink.ran()
    assert shrink.limits(limits) == limits


def test_rows_beyond_the_limit_pause_the_least_urgent_first_be_they_prompts_or_not() -> None:
    rows = [row("p", todo=9), row("d", arrival=1), row("batch", priority=2), row("later", arrival=2, todo=3)]
    assert schedule(rows, 0, Limits(64, rows=2)) == Plan(("d",), (Chunk("p", 9),))
    assert schedule(rows, 0, Limits(64, rows=3)) == Plan(("d",), (Chunk("p", 9), Chunk("later", 3)))


# An engine whose forward fails above some size


@dataclass
class Counting:
    """A model whose next token is a function of the last one and its position; a step has memory for so much."""

    rows: int  # sequences in a step
    tokens: int
    context_len: int = 64
    vocab_size: int = 97
    kernels: None = None
    geometry: Geometry = field(default_factory=lambda: Geometry(1, 1, 1, torch.float32))
    eos_ids: frozenset[int] = frozenset()
    failed: int = 0

    def next(self, token: int, position: int) -> int:
        return (31 * token + 7 * position + 1) % self.vocab_size

    def answer(self, prompt: Rows[int], count: int) -> list[int]:
        ids = list(prompt)
        for _ in range(count):
            ids.append(self.next(ids[-1], len(ids) - 1))
        return ids[len(prompt) :]

    def step(
        self,
        store: KvStore,
        spans: Rows[Span],
        ids: Rows[int],
        draws: Rows[tuple[int, Draw]],
        reported: Rows[int],
        abandon: object,
    ) -> Computed:
        if len(spans) > self.rows or len(ids) > self.tokens:
            self.failed += 1
            raise OutOfMemory("none left")
        for span in spans:  # each position has its block
            assert store.pool.count(span.key) * BLOCK >= span.start + span.length
        positions = [position for span in spans for position in range(span.start, span.start + span.length)]
        return Computed([self.next(ids[index], positions[index]) for index, _ in draws], {})


@dataclass
class Job:
    prompt: tuple[int, ...]
    tokens: int
    priority: int
    preemptions: int  # MAX_PREEMPTIONS: its next attempt is reserved
    ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None

    def attempt(self, number: int) -> Sequence:
        sampling = Sampling(max_tokens=self.tokens, temperature=0.0, ignore_eos=True)
        reserved = self.preemptions >= MAX_PREEMPTIONS
        key = f"{number}@{self.preemptions}"
        return Sequence(key, self.prompt, sampling, list(self.ids), self.priority, number, reserved)


class Worker:
    """Admits jobs as long as they go in, and begins them again when they were evicted."""

    def __init__(self, engine: Engine, jobs: list[Job]) -> None:
        self.engine, self.jobs = engine, jobs
        self.waiting = list(range(len(jobs)))
        self.steps = 0

    def run(self, most_steps: int) -> None:
        while self.waiting or self.engine.has_work:
            with suppress(NoRoom):
                while self.waiting:
                    self.engine.add(self.jobs[self.waiting[0]].attempt(self.waiting[0]))
                    self.waiting.pop(0)
            self.step()
            assert self.steps < most_steps, f"no end: {self.engine!r}"

    def step(self) -> None:
        self.steps += 1
        step = self.engine.step()
        for new in step.tokens:
            job = self.jobs[int(new.key.partition("@")[0])]
            assert job.finish is None
            job.finish = new.finish
            if new.finish is not FinishReason.ERROR:
                assert new.seq == len(job.ids)
                job.ids.append(new.token)
        for key in step.evicted:
            number = int(key.partition("@")[0])
            assert self.jobs[number].preemptions < MAX_PREEMPTIONS, "a reserved one is never evicted"
            self.jobs[number].preemptions += 1
            self.waiting.append(number)
        cast(PagedKv, self.engine._kv).pool.check()


def engine_of(model: Counting, blocks: int, prefix_cache: bool = False) -> Engine:
    config = EngineConfig(model=Path("none"), block_size=BLOCK, num_blocks=blocks, prefill_chunk=CHUNK, max_running=8)
    tensor = torch.zeros(blocks, *model.geometry.block_shape(BLOCK))
    store = PagedKv(model.geometry, BlockPool(blocks), BLOCK, tensor, prefix_cache)
    return Engine(cast(Model, model), store, config)


JOBS = st.builds(
    Job,
    prompt=st.lists(st.integers(0, 96), min_size=1, max_size=40).map(tuple),
    tokens=st.integers(1, 20),
    priority=st.integers(0, 2),
    preemptions=st.integers(0, MAX_PREEMPTIONS),
)


@given(
    jobs=st.lists(JOBS, min_size=1, max_size=12),
    rows=st.integers(0, 8),
    tokens=st.integers(0, 40),
    blocks=st.integers(16, 60),
    prefix_cache=st.booleans(),
)
def test_whatever_is_too_large_for_memory_each_sequence_ends_and_no_block_is_lost(
    jobs: list[Job], rows: int, tokens: int, blocks: int, prefix_cache: bool
) -> None:
    model = Counting(rows, tokens)
    engine = engine_of(model, blocks, prefix_cache)
    worker = Worker(engine, jobs)
    wanted = sum(len(job.prompt) + job.tokens for job in jobs)
    # Each attempt may compute its job anew, and each size is tried in vain before a smaller one.
    worker.run(most_steps=(MAX_PREEMPTIONS + 1) * wanted + 20 * len(jobs))
    for job in jobs:
        assert job.finish in (FinishReason.LENGTH, FinishReason.ERROR)
        assert job.ids == model.answer(job.prompt, job.tokens)[: len(job.ids)]
        if rows and tokens >= BLOCK:
            assert job.finish is FinishReason.LENGTH, "there is memory for it alone"
        if not rows or not tokens:
            assert (job.finish, job.ids) == (FinishReason.ERROR, [])
    assert engine.stats().available == blocks
    assert engine.out_of_memory == model.failed
    assert not engine.has_work


def test_reserved_rows_that_do_not_all_fit_take_turns_and_all_come_to_their_end() -> None:
    jobs = [Job((number,) * 3, 10, 1, MAX_PREEMPTIONS) for number in range(8)]
    model = Counting(rows=3, tokens=40)
    engine = engine_of(model, 60)
    Worker(engine, jobs).run(most_steps=100)
    assert [job.ids for job in jobs] == [model.answer(job.prompt, 10) for job in jobs]
    assert model.failed == 4, "with 24, 12 and 6 tokens of prompts, and then with more than half of the rows"


def test_once_there_is_memory_again_steps_grow_to_what_they_were() -> None:
    model = Counting(rows=8, tokens=8)
    engine = engine_of(model, 60)
    Worker(engine, [Job((1,) * 40, 2, 1, 0)]).run(most_steps=20)
    assert repr(engine._shrink) == "Shrink(tokens=8/32, rows=8/8)"
    model.tokens = 100
    worker = Worker(engine, [Job((1,) * 3, 20, 1, 0) for _ in range(8)])
    while repr(engine._shrink) != "Shrink(tokens=32/32, rows=8/8)":
        worker.jobs.append(Job((1,) * 3, 20, 1, 0))
        worker.waiting.append(len(worker.jobs) - 1)
        worker.run(most_steps=1000)
    assert worker.steps == pytest.approx(2 * RECOVERS_AFTER, abs=20)
    assert model.failed == 2


def test_a_sequence_that_fails_alone_ends_with_an_error_and_gives_everything_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = engine_of(Counting(rows=8, tokens=0), 16)
    engine.add(Job((1, 2), 5, 1, 0).attempt(0))
    with caplog.at_level(logging.WARNING):
        step = engine.step()
    assert step.tokens == (NewToken("0@0", 0, NO_MEMORY, FinishReason.ERROR),)
    assert step.evicted == step.held == ()
    assert engine.stats().free == 16
    assert not engine.has_work
    assert [record.getMessage() for record in caplog.records] == [
        "a step ran out of memory (none left): 0@0 ends, there is not enough for it alone, "
        "Shrink(tokens=32/32, rows=8/8)"
    ]


def test_what_is_cached_of_a_sequence_that_ends_for_want_of_memory_stays_good() -> None:
    model = Counting(rows=8, tokens=40)
    engine = engine_of(model, 16, prefix_cache=True)
    engine.add(Job(tuple(range(8)), 5, 1, 0).attempt(0))
    engine.step()
    model.tokens = 0
    engine.step()
    assert engine.stats().cached == 2


def test_blocks_that_decoding_rows_took_for_a_failed_step_stay_theirs() -> None:
    model = Counting(rows=8, tokens=40)
    engine = engine_of(model, 16)
    for number in range(2):
        engine.add(Job((1,) * BLOCK, 5, number, 0).attempt(number))
    engine.step()
    model.rows = 1
    step = engine.step()  # both are at a block's end
    assert step == dataclasses.replace(step, tokens=(), evicted=("1@0",), held=())
    assert engine._kv.pool.count("0@0") == 2
    before = engine.computed_tokens
    assert [new.seq for new in engine.step().tokens] == [1]
    assert engine.computed_tokens == before + 1
    assert engine._kv.pool.count("0@0") == 2


# Real layers, which have written keys by the time they fail


@pytest.mark.parametrize("store_of", [contiguous, paged])
@pytest.mark.parametrize("fails", [lambda call, spans: call % 3 == 1, lambda call, spans: len(spans) > 2])
def test_steps_that_fail_after_they_have_written_change_no_token(
    tiny_model: LoadModel,
    monkeypatch: pytest.MonkeyPatch,
    store_of: Callable[[Model], KvStore],
    fails: Callable[[int, Rows[Span]], bool],
) -> None:
    model = tiny_model("float32")
    config = EngineConfig(model=Path("tiny"), num_blocks=64, prefill_chunk=24)
    real, calls, failed = model.forward, 0, 0

    def failing(store: KvStore, spans: Rows[Span], *others: Any) -> torch.Tensor:
        nonlocal calls, failed
        logits = real(store, spans, *others)
        calls += 1
        if (len(spans) > 1 or spans[0].length > config.block_size) and fails(calls, spans):
            failed += 1
            raise OutOfMemory
        return logits

    def run(reserved: bool) -> list[list[int]]:
        jobs = [Job(tuple(range(3, 30 + 5 * number)), 12, 1, 0) for number in range(5)]
        for job in jobs:
            job.preemptions = MAX_PREEMPTIONS if reserved else 0
        Worker(Engine(model, store_of(model), config), jobs).run(most_steps=1000)
        assert all(job.finish is FinishReason.LENGTH for job in jobs)
        return [job.ids for job in jobs]

    expected = run(reserved=False)
    monkeypatch.setattr(model, "forward", failing)
    assert run(reserved=False) == run(reserved=True) == expected
    assert failed > 3
