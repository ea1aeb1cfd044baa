"""Log-probabilities: exactly those of a softmax over the model's own logits, one a token, in every way to run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prelay_engine.attention import Span
from prelay_engine.demo import default_cache
from prelay_engine.engine import Engine
from prelay_engine.logprobs import logprobs_of
from prelay_engine.native.build import library
from prelay_engine.native.lib import Kernels
from prelay_engine.sequence import NewToken, Sequence
from prelay_queue.note import Note, TokenLogprobs

from .conftest import LoadModel, contiguous, paged
from .test_engine import PROMPTS, engine_of, sequence

rows = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40)
#: More than a few blocks of the native kernels, and many that are equal.
many = st.lists(st.integers(-20, 20).map(float), min_size=130, max_size=400)


#: How they are computed, and how far from the exact ones they may be: native kernels take exponentials in float32.
WAYS = [(Kernels(library(default_cache(), print), 1), 1e-6), (None, 1e-9)]


@pytest.mark.parametrize(("kernels", "near"), WAYS, ids=["native", "numpy"])
@given(st.one_of(rows, many), st.data())
def test_they_are_the_softmax_s_and_ranked_by_it(
    kernels: Kernels | None, near: float, values: list[float], data: st.DataObject
) -> None:
    row = np.array(values, dtype=np.float32)
    token, count = data.draw(st.integers(0, len(row) - 1)), data.draw(st.integers(0, len(row) + 2))
    logs = torch.log_softmax(torch.tensor(values, dtype=torch.float64), 0).tolist()
    found = logprobs_of(row, token, count, kernels)
    order = sorted(range(len(row)), key=lambda each: (-row[each], each))
    assert found.logprob == pytest.approx(logs[token], abs=near)
    assert found.rank == order.index(token) + 1
    assert [each for each, _ in found.top] == order[:count]
    assert [value for _, value in found.top] == pytest.approx([logs[each] for each in order[:count]], abs=near)


@pytest.mark.parametrize("kernels", [way for way, _ in WAYS], ids=["native", "numpy"])
def test_a_banned_token_is_impossible_and_the_rest_add_up(kernels: Kernels | None) -> None:
    row = np.array([1.0, -np.inf, 2.0], dtype=np.float32)
    found = logprobs_of(row, 1, 3, kernels)
    assert (found.logprob, found.rank) == (-np.inf, 3)
    assert sum(np.exp(value) for _, value in found.top) == pytest.approx(1)


def reporting(number: int, tokens: int = 8, **settings: object) -> Sequence:
    made = sequence(number, tokens, **settings)
    made.sampling = replace(made.sampling, logprobs=3, prompt_logprobs=2, repetition_penalty=1.3)
    return made


def notes_of(engine: Engine) -> dict[str, list[NewToken]]:
    found: dict[str, list[NewToken]] = {}
    while engine.has_work:
        for new in engine.step().tokens:
            found.setdefault(new.key, []).append(new)
    return found


@pytest.fixture(scope="module")
def expected(tiny_model: LoadModel) -> list[Note]:
    """Of one sequence alone, each from one forward over all that comes before."""
    model = tiny_model("float32")
    engine = engine_of(tiny_model)
    engine.add(reporting(3))
    ids = [new.token for new in notes_of(engine)["job3@1"]]
    prompt = PROMPTS[3]
    kv = paged(model)
    everything = [*prompt, *ids[:-1]]
    kv.open("all", len(everything), len(everything))
    logits = model.forward(kv, [Span("all", 0, len(everything))], everything, range(len(everything))).numpy()
    said: list[TokenLogprobs] = [
        logprobs_of(logits[place], token, 2 if place < len(prompt) - 1 else 3, model.kernels)
        for place, token in enumerate([*prompt[1:], *ids])
    ]
    first, rest = said[len(prompt) - 1], said[len(prompt) :]
    return [Note(first, tuple(said[: len(prompt) - 1])), *map(Note, rest)]


@pytest.mark.parametrize("chunk", [5, 24, 512])
def test_a_sequence_among_others_is_told_what_it_would_be_alone(
    tiny_model: LoadModel, expected: list[Note], chunk: int
) -> None:
    for store in (contiguous, paged):
        engine = engine_of(tiny_model, store(tiny_model("float32")), prefill_chunk=chunk)
        for number in range(6):
            engine.add(reporting(number))
        assert [new.note for new in notes_of(engine)["job3@1"]] == expected


@pytest.mark.parametrize("kept", [1, 4])
def test_a_resumed_sequence_is_told_of_the_tokens_that_are_missing(
    tiny_model: LoadModel, expected: list[Note], kept: int
) -> None:
    engine = engine_of(tiny_model)
    engine.add(reporting(3))
    ids = [new.token for new in notes_of(engine)["job3@1"]]
    engine = engine_of(tiny_model, prefill_chunk=7)
    engine.add(reporting(3, ids=ids[:kept]))
    assert [new.note for new in notes_of(engine)["job3@1"]] == expected[kept:]


def test_nothing_is_told_that_was_not_asked_for(tiny_model: LoadModel) -> None:
    engine = engine_of(tiny_model)
    engine.add(sequence(1))
    assert {new.note for new in notes_of(engine)["job1@1"]} == {Note()}
