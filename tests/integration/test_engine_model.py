"""The engine on the demo model: transformers' own texts, and the same bits however a text came about."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from prelay_engine import loading
from prelay_engine.attention import Span
from prelay_engine.blocks import BlockPool
from prelay_engine.config import EngineConfig
from prelay_engine.contiguous import ContiguousKv
from prelay_engine.engine import Engine
from prelay_engine.errors import NoRoom
from prelay_engine.kv import KvStore, PagedKv
from prelay_engine.model import Model
from prelay_engine.sequence import Sequence
from prelay_queue.job import Sampling
from prelay_text.tokenizer import Tokenizer
from tests.bed.cuts import check_jobs

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Count from 1 to 20.",
    "Explain photosynthesis in two sentences.",
    "Who wrote Hamlet?",
    "List three colours and a fruit of each.",
    "What is 12 times 12?",
    "Translate 'good morning' into Spanish.",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "Name the planets of the solar system in order.",
    "Write a Python function that reverses a string.",
    "What does HTTP stand for?",
    "Tell me a joke about a cat.",
    "Summarise the story of Cinderella.",
    "How do magnets work?",
    "What is the boiling point of water in Fahrenheit?",
    "Write a polite email that declines an invitation.",
    "Which is larger, 0.9 or 0.11?",
    "Describe the colour red to someone who cannot see.",
]
TOKENS = 24
Load = Callable[[str], Model]


@pytest.fixture(scope="module")
def load(demo_model: Path) -> Load:
    @cache
    def of(dtype: str) -> Model:
        return loading.load(EngineConfig(model=demo_model, dtype=dtype))  # type: ignore[arg-type]

    return of


@pytest.fixture(scope="module")
def prompts(demo_model: Path) -> list[tuple[int, ...]]:
    """Prompts of different lengths: the later ones repeat their question in a longer message."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    messages = [[{"role": "user", "content": " ".join([text] * (1 + i // 4))}] for i, text in enumerate(QUESTIONS)]
    encode: Any = tokenizer.apply_chat_template
    return [tuple(encode(m, add_generation_prompt=True, return_dict=False)) for m in messages]


def contiguous(model: Model, blocks: int = 256, prefix_cache: bool = False) -> ContiguousKv:
    return ContiguousKv(model.geometry, BlockPool(blocks), 16, prefix_cache)


def paged(model: Model, blocks: int = 256, prefix_cache: bool = False) -> PagedKv:
    tensor = torch.zeros(blocks, *model.geometry.block_shape(16), dtype=model.geometry.dtype)
    return PagedKv(model.geometry, BlockPool(blocks), 16, tensor, prefix_cache)


def engine_on(model: Model, store: KvStore) -> Engine:
    return Engine(model, store, EngineConfig(model=Path("demo"), num_blocks=store.pool.size, prefill_chunk=100))


def answers_of(engine: Engine, sequences: Iterable[Sequence]) -> dict[str, list[int]]:
    started = list(sequences)
    for sequence in started:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
    assert engine.stats().available == engine.stats().total
    return {sequence.key: sequence.ids for sequence in started}


def greedy(number: int, prompt: tuple[int, ...]) -> Sequence:
    return Sequence(f"{number}@1", prompt, Sampling(max_tokens=TOKENS, temperature=0))


def sampled(number: int, prompt: tuple[int, ...], **settings: object) -> Sequence:
    sampling = Sampling(max_tokens=TOKENS, temperature=1.0, top_p=0.95, seed=7 + number, ignore_eos=True)
    return Sequence(f"{number}@1", prompt, sampling, **settings)  # type: ignore[arg-type]


@pytest.mark.slow
def test_greedy_texts_are_those_of_transformers_alone_and_sixteen_at_a_time(
    load: Load, prompts: list[tuple[int, ...]], demo_model: Path
) -> None:
    model = load("float32")
    together = answers_of(engine_on(model, contiguous(model)), [greedy(n, p) for n, p in enumerate(prompts[:16])])
    together |= answers_of(engine_on(model, contiguous(model)), [greedy(n, prompts[n]) for n in range(16, 20)])
    theirs = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    for number, prompt in enumerate(prompts):
        answer = together[f"{number}@1"]
        with torch.no_grad():
            logits = theirs(torch.tensor([[*prompt, *answer]]), logits_to_keep=len(answer) + 1).logits[0]
        # The best token after each prefix is the next of ours: what greedy generation would have given.
        assert logits[:-1].argmax(-1).tolist() == answer
    for number in (1, 7, 12, 19):
        alone = answers_of(engine_on(model, contiguous(model)), [greedy(number, prompts[number])])
        assert alone == {f"{number}@1": together[f"{number}@1"]}


@pytest.mark.slow
def test_greedy_texts_are_those_that_transformers_generates(
    load: Load, prompts: list[tuple[int, ...]], demo_model: Path
) -> None:
    model = load("float32")
    theirs = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        whole = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
        alone = answers_of(engine_on(model, contiguous(model)), [greedy(number, prompt)])
        assert alone == {f"{number}@1": whole[0, len(prompt) :].tolist()}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("number", [0, 19])
def test_prefilling_an_answers_first_ids_again_gives_its_next_logits_bit_for_bit(
    number: int, dtype: str, load: Load, prompts: list[tuple[int, ...]]
) -> None:
    model, prompt = load(dtype), prompts[number]
    assert model.exact, model.exactness
    store = contiguous(model)
    store.open("a", len(prompt) + 96, len(prompt) + 96)
    ids, logits = list(prompt), [model.forward(store, [Span("a", 0, len(prompt))], prompt, [len(prompt) - 1])]
    for _ in range(96):
        ids.append(int(logits[-1].argmax()))
        logits.append(model.forward(store, [Span("a", len(ids) - 1, 1)], ids[-1:], [0]))

    for make, cuts in ((contiguous, (1, 16, 47, 95)), (paged, (33, 48, 63, 80))):
        for kept in cuts:
            again, known = make(model), ids[: len(prompt) + kept]
            again.open("a", len(known), len(known))
            row = model.forward(again, [Span("a", 0, len(known))], known, [len(known) - 1])
            assert torch.equal(row, logits[kept]), f"logits differ after {kept} ids"


@pytest.mark.slow
def test_a_hand_over_gives_the_ids_of_one_process(load: Load, prompts: list[tuple[int, ...]]) -> None:
    model = load("float32")
    chosen = list(enumerate(prompts))[8:16]
    expected = answers_of(engine_on(model, contiguous(model)), [sampled(n, p) for n, p in chosen])

    source, target = paged(model), contiguous(model)
    prefill, decode = engine_on(model, source), engine_on(model, target)
    moved: dict[str, Sequence] = {}
    for number, prompt in chosen:
        prefill.add(sampled(number, prompt, hand_over=True))
    while prefill.has_work:
        for new in prefill.step().tokens:
            number = int(new.key.partition("@")[0])
            moved[new.key] = sequence = sampled(number, prompts[number], ids=[new.token])
            decode.receive(sequence)
            blocks, _ = source.export(new.key)
            target.import_blocks(new.key, source.tensor[blocks], sequence.tokens - 1)
            decode.join(new.key)
            prefill.release(new.key)
            decode.step()
    while decode.has_work:
        decode.step()
    assert {key: sequence.ids for key, sequence in moved.items()} == expected


@pytest.mark.slow
def test_a_seeded_sequence_samples_the_same_ids_alone_and_among_neighbours(
    load: Load, prompts: list[tuple[int, ...]]
) -> None:
    model = load("float32")
    together = answers_of(engine_on(model, contiguous(model)), [sampled(n, p) for n, p in enumerate(prompts[:8])])
    for number in (0, 3, 7):
        alone = answers_of(engine_on(model, contiguous(model)), [sampled(number, prompts[number])])
        assert alone[f"{number}@1"] == together[f"{number}@1"]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_sequences_evicted_from_a_small_pool_come_back_to_the_same_ids(
    dtype: str, load: Load, prompts: list[tuple[int, ...]]
) -> None:
    model, chosen = load(dtype), list(enumerate(prompts))[4:8]
    expected = answers_of(engine_on(model, contiguous(model)), [sampled(n, p) for n, p in chosen])

    engine = engine_on(model, contiguous(model, blocks=10))
    waiting = [sampled(n, p, arrival_ms=n) for n, p in chosen]
    every: dict[str, Sequence] = {}
    evictions = 0
    while waiting or engine.has_work:
        with suppress(NoRoom):
            while waiting:
                engine.add(waiting[0])
                every[waiting[0].key] = waiting[0]
                del waiting[0]
        step = engine.step()
        evictions += len(step.evicted)
        waiting += [dataclasses.replace(every[key]) for key in step.evicted]
    assert evictions > 0
    assert {key: sequence.ids for key, sequence in every.items()} == expected


@pytest.mark.slow
@pytest.mark.parametrize("make", [paged, contiguous])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chats_that_begin_alike_compute_that_once_and_say_the_same_bit_for_bit(
    dtype: str, make: Callable[..., KvStore], load: Load, demo_model: Path
) -> None:
    """Also after a preempt, with ids of the answer, and for the next turn, whose prompt has the answer before."""
    model, tokenizer = load(dtype), AutoTokenizer.from_pretrained(demo_model)
    rules = {"role": "system", "content": "You answer questions about the sea in one sentence. " * 8}
    chats = [[rules, {"role": "user", "content": text}] for text in ("Why is it salty?", "How deep is it?")]
    one, two = (
        tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)) for chat in chats
    )
    answers = answers_of(engine_on(model, contiguous(model)), [sampled(1, one), sampled(2, two)])
    turn = (*two, *answers["2@1"][:-1], *one[-20:])
    third = answers_of(engine_on(model, contiguous(model)), [sampled(3, turn)])["3@1"]

    engine = engine_on(model, make(model, prefix_cache=True))
    computed = [0]

    def ask(number: int, prompt: tuple[int, ...], ids: list[int]) -> list[int]:
        found = answers_of(engine, [sampled(number, prompt, ids=ids)])[f"{number}@1"]
        computed.append(engine.computed_tokens)
        return found

    assert ask(1, one, []) == answers["1@1"]
    assert ask(2, two, []) == answers["2@1"]
    assert ask(2, two, answers["2@1"][:10]) == answers["2@1"]
    assert ask(3, turn, []) == third
    first, second, resumed, last = (b - a for a, b in itertools.pairwise(computed))
    assert first == len(one) + TOKENS - 1
    common = sum(1 for a, b in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))
    assert second == first - len(one) + len(two) - common // 16 * 16
    assert resumed <= 16 + TOKENS - 10
    assert last <= 16 + 20 + TOKENS


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "seeded"])
def test_jobs_cut_anywhere_are_their_undisturbed_runs(load: Load, demo_model: Path, dtype: str, greedy: bool) -> None:
    """As tests/unit/engine/test_exactness.py, with real weights: ids, log-probabilities, text and end."""
    met = check_jobs(load(dtype), Tokenizer.load(demo_model), seed=11, count=4, greedy=greedy)
    assert met["cuts"] > 8
    for what in ("inside a character", "hits"):
        assert met[what] > 0, met


def test_its_tokenizer_splits_text_as_the_model_was_trained(demo_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    assert tokenizer("<|im_start|>user\nHi<|im_end|>").input_ids == [1, 4093, 198, 26843, 2]
    text = "In 2024 it's 3.14 — naïve café,\n\n  日本語 🙂\t1e10 ²½"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text
    assert [tokenizer.decode([i]) for i in tokenizer("12345").input_ids] == list("12345")
    assert tokenizer.chat_template
    assert tokenizer.eos_token_id == 2
