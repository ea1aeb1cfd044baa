"""Stop strings in the writer, with tokenizers of several kinds: the end it writes is the one every reader finds."""

from __future__ import annotations

import json
from functools import cache
from itertools import chain
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prelay_queue.job import Claim, FinishReason, JobSpec, Sampling
from prelay_queue.settings import QueueSettings
from prelay_text.assembler import Assembler
from prelay_text.tokenizer import Tokenizer
from prelay_worker.config import NullModel, Role, WorkerConfig
from prelay_worker.messages import Stop
from prelay_worker.process import _matcher_factory
from prelay_worker.worker import MatcherFactory
from prelay_worker.writer import Handoff, Tokens, Write, Writer
from tests.unit.text.families import BACKENDS
from tests.unit.worker.test_writer import FakeQueue

TEXTS = ["the dog, the dog", "日本語 日本", "😀😀 emoji", "a\n\nb", "ababac", "naïve café"]

Kind = tuple[Tokenizer, MatcherFactory]


@pytest.fixture(scope="module", params=["byte_level", "llama", "metaspace", "unigram"])
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    """A tokenizer, and what a worker of its folder makes its matchers with."""
    folder = tmp_path_factory.mktemp(request.param)
    backend = BACKENDS[request.param]()
    backend.save(str(folder / "tokenizer.json"))
    sizes = {"vocab_size": backend.get_vocab_size(), "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(sizes))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    queue = QueueSettings("unix:///nowhere", "t")
    config = WorkerConfig(Role.UNIFIED, queue, folder, 16, null=NullModel())
    return Tokenizer.load(folder), _matcher_factory(config)


@cache
def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    one = st.integers(0, tokenizer.vocab_size - 1).map(lambda token: [token])
    text = st.sampled_from(TEXTS).map(tokenizer.encode)
    return st.lists(st.one_of(one, text), min_size=1, max_size=8).map(lambda parts: list(chain(*parts)))


@st.composite
def stops_for(draw: st.DrawFn, text: str) -> list[str]:
    """Stop strings that tend to occur: parts of the text, some with another character behind."""
    start = draw(st.integers(0, max(len(text) - 1, 0)))
    part = text[start : start + draw(st.integers(1, 6))] + draw(st.sampled_from(["", "", "x"]))
    return [part] if part and "\ufffd" not in part else ["dog"]


def first_stop(tokenizer: Tokenizer, ids: list[int], stops: list[str]) -> int | None:
    """How many ids there are when a stop string is complete in the text of the whole, the slow way."""
    texts = (tokenizer.decode(ids[:count]) for count in range(1, len(ids) + 1))
    return next((count for count, text in enumerate(texts, 1) if any(stop in text for stop in stops)), None)


def written(queue: FakeQueue, begin: int) -> tuple[list[int], str]:
    """The ids that were sent, from place `begin` on without a gap, and the reason that they end with."""
    ids: list[int] = []
    reason = ""
    for call in chain(*queue.sent):
        assert reason == "", "nothing is written after the end"
        args: tuple[Any, ...] = call.args
        if call.name == "emit":
            ((_, _, seq, found),) = orjson.loads(args[1])
        else:
            assert call.name == "finish"
            seq, found, reason = args[3], orjson.loads(args[4]), args[5]
        assert seq == begin + len(ids)
        ids += found
    return ids, reason


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_an_answer_ends_at_the_token_that_completes_a_stop_whatever_attempts_and_steps_it_took(
    kind: Kind, data: st.DataObject
) -> None:
    # Given an answer, a stop string, and attempts of which each begins with ids that stand
    tokenizer, make = kind
    ids = data.draw(ids_of(tokenizer), "ids")
    stops = data.draw(stops_for(tokenizer.decode(ids)), "stops")
    end = first_stop(tokenizer, ids, stops)
    last = len(ids) if end is None else end
    spec = JobSpec("r/0", (), Sampling(len(ids), stop=tuple(stops)))
    kept = [0, *sorted(data.draw(st.lists(st.integers(0, last - 1), max_size=2), "kept"))]
    log: list[int] = []
    for epoch, (begin, until) in enumerate(zip(kept, [*kept[1:], len(ids)], strict=True), 1):
        # When each is written in steps of random sizes, the first perhaps a hand-over
        queue, said = FakeQueue(), list[object]()
        writer = Writer(queue, "me", "here", said.append)  # type: ignore[arg-type]
        matcher = make(Claim(spec, epoch, tuple(ids[:begin])))
        assert matcher is not None
        writer.watch(f"r/0@{epoch}", matcher)
        writes: list[Write] = []
        seq = begin
        while seq < until:
            size = data.draw(st.integers(1, until - seq), "size")
            reason = FinishReason.LENGTH if seq + size == len(ids) else None
            writes.append(Tokens("r/0", epoch, seq, tuple(ids[seq : seq + size]), reason))
            seq += size
        writer.put(writes, lambda: None)
        writer.start()
        writer.stop(timeout_s=10)
        found, reason_said = written(queue, begin)
        log += found
    # Then the log ends with that token, and says why
    assert log == ids[:last]
    assert reason_said == (FinishReason.LENGTH if end is None else FinishReason.STOP)
    assert said == ([] if end is None else [Stop("r/0", len(kept), "stop string")])
    # And whoever reads it finds the same end
    reader = Assembler(tokenizer, stops)
    delta = reader.push(log)
    text = (delta.text if delta else "") + reader.finish(FinishReason(reason_said)).text
    assert (reader.match is not None) == (end is not None)
    assert not any(stop in text for stop in stops)
    assert tokenizer.decode(log).startswith(text)


def test_a_first_token_that_completes_a_stop_is_the_answer_and_is_not_handed_over(kind: Kind) -> None:
    tokenizer, make = kind
    token = tokenizer.encode("dog")[-1]
    stop = tokenizer.decode([token])
    queue = FakeQueue()
    writer = Writer(queue, "me", "here", lambda _: None)  # type: ignore[arg-type]
    matcher = make(Claim(JobSpec("r/0", (), Sampling(4, stop=(stop,))), 1))
    assert matcher is not None
    writer.watch("r/0@1", matcher)
    writer.put([Handoff("r/0", 1, 0, token, b"kv")], lambda: None)
    writer.start()
    writer.stop(timeout_s=10)
    ((call,),) = queue.sent
    assert call.name == "finish"
    assert call.args[5] == "stop"
