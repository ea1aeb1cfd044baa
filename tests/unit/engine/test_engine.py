from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

import pytest
import torch

from prelay_engine.attention import Span
from prelay_engine.blocks import BlockPool
from prelay_engine.config import EngineConfig
from prelay_engine.engine import Engine
from prelay_engine.errors import ConfigError, EngineError, NoRoom, UnknownSequence
from prelay_engine.flag import Flag
from prelay_engine.kv import KvStore, PagedKv
from prelay_engine.sequence import NewToken, Sequence, Step
from prelay_queue.job import FinishReason, Sampling

from .conftest import LoadModel, contiguous, paged

PROMPTS = [torch.randint(3, 300, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(5, 70, 8)]
CONFIG = EngineConfig(model=Path("tiny"), num_blocks=64, prefill_chunk=24)
Answers = dict[str, list[int]]


def sequence(number: int, tokens: int = 12, **settings: object) -> Sequence:
    """A seeded sequence that samples (so that a wrong logit shows) and does not stop by itself."""
    sampling = Sampling(max_tokens=tokens, temperature=1.0, seed=number, ignore_eos=True)
    return Sequence(f"job{number}@1", tuple(PROMPTS[number % len(PROMPTS)]), sampling, **settings)  # type: ignore[arg-type]


def engine_of(tiny_model: LoadModel, store: KvStore | None = None, **changes: object) -> Engine:
    model = tiny_model("float32")
    config = dataclasses.replace(CONFIG, **changes)  # type: ignore[arg-type]
    return Engine(model, store or contiguous(model, config.num_blocks, config.block_size), config)


def run(engine: Engine, answers: Answers | None = None) -> Answers:
    """Step until nothing runs; the tokens of each sequence, checked for gaps."""
    answers = {} if answers is None else answers
    while engine.has_work:
        for new in engine.step().tokens:
            ids = answers.setdefault(new.key, [])
            assert new.seq == len(ids)
            ids.append(new.token)
    return answers


@pytest.fixture(scope="module")
def expected(tiny_model: LoadModel) -> Answers:
    """What every sequence gives when it runs alone."""
    answers: Answers = {}
    for number in range(len(PROMPTS)):
        engine = engine_of(tiny_model)
        engine.add(sequence(number))
        run(engine, answers)
    return answers


def test_sequences_run_together_as_they_run_alone(tiny_model: LoadModel, expected: Answers) -> None:
    model = tiny_model("float32")
    for store in (contiguous(model), paged(model)):
        engine = engine_of(tiny_model, store)
        for number in range(len(PROMPTS)):
            engine.add(sequence(number))
        assert run(engine) == expected
        assert engine.stats().free == engine.stats().total == 64


def test_sequences_that_come_while_others_decode_change_nothing(tiny_model: LoadModel, expected: Answers) -> None:
    engine = engine_of(tiny_model, prefill_chunk=7)
    answers: Answers = {}
    for number in range(len(PROMPTS)):
        engine.add(sequence(number))
        for new in engine.step().tokens:
            answers.setdefault(new.key, []).append(new.token)
    assert run(engine, answers) == expected


def test_a_resumed_sequence_goes_on_as_if_it_had_never_stopped(tiny_model: LoadModel, expected: Answers) -> None:
    for kept in (1, 5, 11):
        engine = engine_of(tiny_model)
        engine.add(sequence(4, ids=expected["job4@1"][:kept]))
        tokens: list[NewToken] = []
        while engine.has_work:
            tokens += engine.step().tokens
        assert [new.seq for new in tokens] == list(range(kept, 12))
        assert [new.token for new in tokens] == expected["job4@1"][kept:]


def test_a_hand_over_gives_the_tokens_of_one_process(tiny_model: LoadModel, expected: Answers) -> None:
    model = tiny_model("float32")
    source, target = paged(model), contiguous(model)
    prefill, decode = engine_of(tiny_model, source), engine_of(tiny_model, target)
    answers: Answers = {}
    for number in range(len(PROMPTS)):
        prefill.add(sequence(number, hand_over=True))
    while prefill.has_work:
        step = prefill.step()
        assert {new.key for new in step.tokens} == set(step.held)
        for new in step.tokens:
            number = int(new.key[3])
            answers[new.key] = [new.token]
            moved = sequence(number, ids=[new.token])
            decode.receive(moved)
            blocks, _ = source.export(new.key)
            target.import_blocks(new.key, source.tensor[blocks], moved.tokens - 1)
            decode.join(new.key)
            prefill.release(new.key)
    assert run(decode, answers) == expected
    assert prefill.stats().free == decode.stats().free == 64


def test_a_copy_that_takes_ten_steps_costs_its_neighbours_none_and_the_one_that_joins_has_a_token_in_the_next(
    tiny_model: LoadModel, expected: Answers
) -> None:
    model = tiny_model("float32")
    source, target = paged(model), contiguous(model)
    prefill, decode = engine_of(tiny_model, source), engine_of(tiny_model, target)
    prefill.add(sequence(4, hand_over=True))
    while not prefill.held:
        first = prefill.step().tokens
    for number in (0, 1):
        decode.add(sequence(number, tokens=40))
    decode.step()
    neighbours = {"job0@1", "job1@1"}
    # Given a copy that stands after its first block
    (new,), middle, goes_on = first, threading.Event(), threading.Event()
    blocks, _ = source.export(new.key)

    def slowly() -> Iterator[torch.Tensor]:
        for block in blocks:
            yield source.tensor[block]
            middle.set()
            assert goes_on.wait(60)

    moved = sequence(4, ids=[new.token])
    decode.receive(moved)
    copier = threading.Thread(target=target.import_blocks, args=(new.key, slowly(), moved.tokens - 1))
    copier.start()
    assert middle.wait(60)
    # When the others decode, each has a token in each step
    for _ in range(10):
        assert {new.key for new in decode.step().tokens} == neighbours
    goes_on.set()
    copier.join()
    # Then the step after the copy computes one position for each of them, the new one too
    before = decode.computed_tokens
    decode.join(new.key)
    assert {new.key for new in decode.step().tokens} == {*neighbours, "job4@1"}
    assert decode.computed_tokens - before == 3
    while decode.has_work:
        decode.step()
    assert moved.ids == expected["job4@1"]


def test_evicted_sequences_come_back_to_the_same_answer(tiny_model: LoadModel, expected: Answers) -> None:
    # Room for the longest answer and little more, so that all evict each other many times.
    engine = engine_of(tiny_model, num_blocks=7)
    answers: Answers = {}
    waiting = [sequence(number, arrival_ms=number) for number in range(len(PROMPTS))]
    running: dict[str, Sequence] = {}
    evictions = 0
    while waiting or engine.has_work:
        with suppress(NoRoom):  # as many as go in at all, without the headroom that `room` asks for
            while waiting:
                engine.add(waiting[0])
                started = waiting.pop(0)
                running[started.key] = started
        step = engine.step()
        for new in step.tokens:
            answers.setdefault(new.key, []).append(new.token)
            assert new.seq == len(answers[new.key]) - 1
        for key in step.evicted:
            evictions += 1
            waiting.append(dataclasses.replace(running.pop(key), ids=list(answers.get(key, []))))
        engine._kv.pool.check()
    assert answers == expected
    assert evictions > 0
    assert engine.stats().free == 7


def test_room_leaves_running_sequences_a_block_to_grow_into_but_add_does_not(tiny_model: LoadModel) -> None:
    engine = engine_of(tiny_model, num_blocks=4)
    engine.add(sequence(1))  # 13 tokens: 1 block
    assert engine.room(32)
    assert not engine.room(33)
    engine.add(Sequence("wide@1", tuple(range(3, 51)), Sampling(max_tokens=4)))
    assert engine.stats().free == 0


def test_what_a_sequence_gives_is_what_the_others_may_have_more_when_it_goes(tiny_model: LoadModel) -> None:
    model = tiny_model("float32")
    engine = engine_of(tiny_model, paged(model))
    for number, settings in enumerate(({}, {"reserved": True}, {"hand_over": True})):
        engine.add(sequence(number, **settings))
    while not engine.held:
        engine.step()
    engine.receive(sequence(3, ids=[5]))
    for key in ("job0@1", "job1@1", "job2@1", "job3@1"):
        spare, gives = engine.spare, engine.gives(key)
        assert gives > 0
        engine.release(key) if key == "job2@1" else engine.drop(key)
        engine.copied(key)
        assert engine.spare == spare + gives
    assert engine.spare == 64


def test_a_reserved_sequence_takes_its_whole_answer_at_admission_and_is_never_evicted(
    tiny_model: LoadModel, expected: Answers
) -> None:
    engine = engine_of(tiny_model, num_blocks=4)
    engine.add(sequence(3, priority=2, arrival_ms=99, reserved=True))  # 29 + 12 tokens: 3 blocks
    assert engine.stats().free == 1
    engine.add(sequence(1, priority=0))  # 13 + 12 tokens: 1 block now, a second later
    answers: Answers = {}
    evicted: list[str] = []
    while engine.has_work:
        step = engine.step()
        evicted += step.evicted
        for new in step.tokens:
            answers.setdefault(new.key, []).append(new.token)
    assert evicted == ["job1@1"]
    assert answers["job3@1"] == expected["job3@1"]


def test_fits_asks_for_the_whole_pool_and_the_context(tiny_model: LoadModel) -> None:
    engine = engine_of(tiny_model, num_blocks=4)
    assert engine.fits(64)
    assert not engine.fits(65)
    assert not engine_of(tiny_model, num_blocks=64).fits(513)


def test_without_a_slot_or_blocks_there_is_no_room_and_nothing_is_taken(tiny_model: LoadModel) -> None:
    engine = engine_of(tiny_model, max_running=1)
    engine.add(sequence(0))
    assert not engine.room(1)
    with pytest.raises(NoRoom, match="max_running"):
        engine.add(sequence(1))
    small = engine_of(tiny_model, num_blocks=1)
    with pytest.raises(NoRoom, match="needs 2 blocks, 1 of 1 are free"):
        small.add(sequence(2))
    assert small.stats().free == 1
    assert small.running == 0


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"ignore_eos": False}, FinishReason.STOP),
        ({"stop_token_ids": True}, FinishReason.STOP),
        ({"max_tokens": 3}, FinishReason.LENGTH),
    ],
)
def test_a_sequence_ends_by_eos_stop_id_or_length_with_its_last_token(
    settings: dict[str, object],
    reason: FinishReason,
    tiny_model: LoadModel,
    expected: Answers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    third = expected["job2@1"][2]
    assert third not in expected["job2@1"][:2]
    if "ignore_eos" in settings:
        monkeypatch.setattr(tiny_model("float32"), "eos_ids", frozenset({third}))
    if "stop_token_ids" in settings:
        settings = {"stop_token_ids": (third,)}
    started = sequence(2)
    started.sampling = dataclasses.replace(started.sampling, **settings)  # type: ignore[arg-type]
    engine = engine_of(tiny_model)
    tokens: list[NewToken] = []
    engine.add(started)
    while engine.has_work:
        tokens += engine.step().tokens
    assert [new.token for new in tokens] == expected["job2@1"][:3]
    assert [new.finish for new in tokens] == [None, None, reason]
    assert engine.stats().free == 64
    assert not engine.drop("job2@1")


def test_eos_is_just_a_token_when_it_is_to_be_ignored(
    tiny_model: LoadModel, expected: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_model("float32"), "eos_ids", frozenset({expected["job2@1"][2]}))
    engine = engine_of(tiny_model)
    engine.add(sequence(2))
    assert run(engine)["job2@1"] == expected["job2@1"]


def test_a_sequence_ends_where_the_context_does(tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_model("float32"), "context_len", 20)
    engine = engine_of(tiny_model)
    tokens: list[NewToken] = []
    engine.add(sequence(1, tokens=100))  # 13 in the prompt
    while engine.has_work:
        tokens += engine.step().tokens
    assert len(tokens) == 7
    assert tokens[-1].finish is FinishReason.LENGTH
    with pytest.raises(EngineError, match="the context holds 20"):
        engine.add(sequence(2))


def test_a_hand_over_that_ends_with_its_first_token_is_finished_and_not_held(tiny_model: LoadModel) -> None:
    engine = engine_of(tiny_model)
    engine.add(sequence(0, tokens=1, hand_over=True))
    step = engine.step()
    assert [new.finish for new in step.tokens] == [FinishReason.LENGTH]
    assert step.held == ()
    assert engine.stats().free == 64


def test_a_held_sequence_keeps_its_blocks_but_no_slot_until_it_is_released(tiny_model: LoadModel) -> None:
    engine = engine_of(tiny_model, max_running=1)
    engine.add(sequence(4, hand_over=True))
    steps = []
    while engine.has_work:
        steps.append(engine.step())
    assert [step.held for step in steps] == [(), ("job4@1",)]
    assert (engine.running, engine.held, engine.stats().leased) == (0, 1, 3)
    assert engine.room(16)
    engine.release("job4@1")
    assert engine.stats().free == 64
    with pytest.raises(UnknownSequence):
        engine.release("job4@1")


def test_a_dropped_sequence_gives_everything_back_at_once(tiny_model: LoadModel) -> None:
    engine = engine_of(tiny_model)
    engine.add(sequence(7))
    engine.add(sequence(6, hand_over=True))
    engine.step()
    assert engine.drop("job7@1")
    assert engine.drop("job6@1")
    assert not engine.drop("job6@1")
    assert not engine.has_work
    assert engine.step() == Step()
    assert engine.stats().free == 64


def test_a_sequence_dropped_while_it_is_copied_keeps_its_blocks_until_the_copy_has_ended(
    tiny_model: LoadModel,
) -> None:
    engine = engine_of(tiny_model, max_running=1)
    engine.receive(sequence(4, ids=[5]))
    assert (engine.waiting, engine.has_work) == (1, False)
    engine.copied("job4@1")  # an end that nobody waits for changes nothing
    assert engine.stats().copying == 3
    assert engine.drop("job4@1")
    assert not engine.drop("job4@1")
    assert engine.stats().copying == 3
    assert engine.stats().orphaned == 0
    assert not engine.room(1), "its slot is not free either"
    with pytest.raises(UnknownSequence):
        engine.join("job4@1")
    engine.copied("job4@1")
    assert engine.stats().free == 64
    engine.copied("job4@1")


def test_what_makes_no_sense_is_refused(tiny_model: LoadModel) -> None:
    engine = engine_of(tiny_model)
    engine.add(sequence(0))
    with pytest.raises(EngineError, match="already here"):
        engine.add(sequence(0))
    with pytest.raises(EngineError, match="no token to feed"):
        engine.receive(sequence(1))
    with pytest.raises(EngineError, match="nothing left"):
        engine.add(sequence(1, tokens=2, ids=[4, 5]))
    with pytest.raises(EngineError, match="empty prompt"):
        engine.add(Sequence("x@1", (), Sampling(max_tokens=3)))
    with pytest.raises(UnknownSequence):
        engine.join("job0@1")
    with pytest.raises(ConfigError, match="block_size"):
        engine_of(tiny_model, contiguous(tiny_model("float32"), block_size=8))
    assert engine.running == 1


def test_logits_that_are_no_numbers_end_their_own_sequence_only(
    tiny_model: LoadModel, expected: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("float32")
    real = model.forward

    def poisoned(store: KvStore, spans: list[Span], ids: list[int], wanted: list[int], abandon: None) -> torch.Tensor:
        logits = real(store, spans, ids, wanted, abandon).clone()
        if len(wanted) == 2:
            logits[[span.key for span in spans].index("job1@1")] = float("nan")
        return logits

    monkeypatch.setattr(model, "forward", poisoned)
    engine = engine_of(tiny_model)
    engine.add(sequence(0))
    engine.add(sequence(1))
    first = engine.step()
    assert NewToken("job1@1", 0, -1, FinishReason.ERROR) in first.tokens
    answers = {"job0@1": [new.token for new in first.tokens if new.key == "job0@1"]}
    assert run(engine, answers) == {"job0@1": expected["job0@1"]}


def test_its_repr_shows_its_state(tiny_model: LoadModel) -> None:
    engine = engine_of(tiny_model)
    engine.add(sequence(4))
    engine.step()
    assert repr(engine) == "<Engine 61/64 blocks free; job4@1: prefill 24/37>"


class Sometimes(Flag):
    """Set at every fifth look: before any of three layers, and not in each step."""

    looks = 0

    def is_set(self) -> bool:
        self.looks += 1
        return self.looks % 5 == 4


def abandon(engine: Engine, flag: Flag) -> tuple[Answers, int]:
    """Run a batch of all prompts in steps that `flag` abandons; how many were."""
    answers: Answers = {}
    abandoned = 0
    for number in range(len(PROMPTS)):
        engine.add(sequence(number, priority=2))
    while engine.has_work:
        before = engine.computed_tokens
        for new in engine.step(flag).tokens:
            answers.setdefault(new.key, []).append(new.token)
        abandoned += engine.computed_tokens == before
    assert engine.computed_tokens == sum(len(PROMPTS[number]) + 11 for number in range(len(PROMPTS)))
    stats = engine.stats()
    assert stats.free + stats.cached == stats.total
    return answers, abandoned


@pytest.mark.parametrize("cache", [False, True])
def test_steps_of_a_batch_that_are_abandoned_at_any_layer_change_no_token(tiny_model: LoadModel, cache: bool) -> None:
    model = tiny_model("float32", "torch")
    plain = Engine(model, contiguous(model), CONFIG)
    for number in range(len(PROMPTS)):
        plain.add(sequence(number))
    engine = Engine(model, PagedKv(model.geometry, BlockPool(64), 16, paged(model).tensor, cache), CONFIG)
    answers, abandoned = abandon(engine, Sometimes())
    assert answers == run(plain)
    assert abandoned > 10


def test_native_steps_are_abandoned_while_the_flag_is_set_but_for_every_third(
    tiny_model: LoadModel, expected: Answers
) -> None:
    flag = Flag()
    flag.set()
    engine = engine_of(tiny_model)
    answers, abandoned = abandon(engine, flag)
    assert answers == expected
    assert abandoned > 20


def test_native_steps_may_be_abandoned_at_any_moment(tiny_model: LoadModel, expected: Answers) -> None:
    flag, stop = Flag(), threading.Event()

    def wave() -> None:
        while not stop.wait(0.0002):
            flag.clear() if flag.is_set() else flag.set()

    waver = threading.Thread(target=wave)
    waver.start()
    answers, _ = abandon(engine_of(tiny_model), flag)
    stop.set()
    waver.join()
    assert answers == expected


def test_a_step_with_an_urgent_row_is_not_abandoned_and_the_batch_waits_for_its_prompt(
    tiny_model: LoadModel, expected: Answers
) -> None:
    engine = engine_of(tiny_model)
    engine.add(sequence(0, priority=2))
    engine.add(sequence(8, priority=1))
    flag = Flag()
    flag.set()
    answers: Answers = {}
    while "job8@1" not in answers:
        before = engine.computed_tokens
        for new in engine.step(flag).tokens:
            answers.setdefault(new.key, []).append(new.token)
        assert before < engine.computed_tokens <= len(PROMPTS[8])
    assert list(answers) == ["job8@1"]
    run(engine, answers)
    assert answers == {key: expected[key] for key in ("job8@1", "job0@1")}


def test_a_batch_beside_decoding_urgent_rows_goes_on_in_their_steps(tiny_model: LoadModel, expected: Answers) -> None:
    engine = engine_of(tiny_model)
    engine.add(sequence(8, priority=0, tokens=60))
    while engine.step().tokens == ():
        pass
    for number in range(2):
        engine.add(sequence(number, priority=2))
    steps = [engine.step().tokens for _ in range(58)]
    assert all("job8@1" in {new.key for new in step} for step in steps), "it is in each step"
    answers: Answers = {}
    for new in chain.from_iterable(steps):
        answers.setdefault(new.key, []).append(new.token)
    assert answers["job0@1"] == expected["job0@1"], "and the batch did not wait for its end"
    assert answers["job1@1"] == expected["job1@1"]
