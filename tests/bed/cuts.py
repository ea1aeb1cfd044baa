"""Jobs that are taken away from their workers again and again, and compared with the same jobs left alone.

Everything that a fleet does to a job, in one process: engines with chunks of several sizes and caches that keep what
came before, hand-overs between two of them, neighbours, preempts after any token, and a client that was given some of
the tokens. What stands is ids; matcher and assembler are made anew from them, as workers and relays do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import torch

from prelay_engine.blocks import BlockPool
from prelay_engine.config import EngineConfig
from prelay_engine.contiguous import ContiguousKv
from prelay_engine.engine import Engine
from prelay_engine.kv import KvStore, PagedKv
from prelay_engine.model import Model
from prelay_engine.sequence import NewToken, Sequence
from prelay_queue.job import FinishReason, Sampling
from prelay_queue.note import TokenLogprobs
from prelay_text.assembler import Assembler
from prelay_text.detokenizer import continues_text
from prelay_text.stops import StopMatcher
from prelay_text.tokenizer import Tokenizer

BLOCK, BLOCKS = 16, 128


class Place(ABC):
    """Where attempts run."""

    def __init__(self, *engines: Engine) -> None:
        self.engines = engines

    @abstractmethod
    def begin(self, sequence: Sequence) -> None:
        """Take it in; its prefill comes with the next steps."""

    @abstractmethod
    def step(self) -> list[NewToken]:
        """One step of each engine."""

    def clear(self) -> None:
        """Take all away, as preempts do. Nothing may be held then."""
        for engine in self.engines:
            for key in list(engine._entries):
                engine.drop(key)
            stats = engine.stats()
            assert stats.free + stats.cached == stats.total
            assert stats.orphaned == 0

    @property
    def hits(self) -> int:
        return sum(engine.prefix_hits for engine in self.engines)


class Unified(Place):
    """One engine prefills and decodes."""

    def __init__(self, model: Model, chunk: int, cache: bool) -> None:
        self.engine = engine_on(model, contiguous(model, cache), chunk)
        super().__init__(self.engine)

    def begin(self, sequence: Sequence) -> None:
        self.engine.add(sequence)

    def step(self) -> list[NewToken]:
        return list(self.engine.step().tokens)


class Split(Place):
    """One engine prefills into blocks; they are copied out of it, and another decodes."""

    def __init__(self, model: Model, chunk: int, cache: bool) -> None:
        shape = (BLOCKS, *model.geometry.block_shape(BLOCK))
        tensor = torch.zeros(shape, dtype=model.geometry.dtype)
        self._source = PagedKv(model.geometry, BlockPool(BLOCKS), BLOCK, tensor, cache)
        self._target = contiguous(model, cache=False)
        self.prefill, self.decode = engine_on(model, self._source, chunk), engine_on(model, self._target, chunk)
        self._coming: dict[str, Sequence] = {}
        super().__init__(self.prefill, self.decode)

    def begin(self, sequence: Sequence) -> None:
        self._coming[sequence.key] = sequence
        self.prefill.add(replace(sequence, ids=list(sequence.ids), hand_over=True))

    def step(self) -> list[NewToken]:
        decoded = list(self.decode.step().tokens)
        prefilled = list(self.prefill.step().tokens)
        for new in prefilled:
            sequence = self._coming.pop(new.key)
            if new.finish is None:
                self._hand_over(sequence, new.token)
        return decoded + prefilled

    def _hand_over(self, sequence: Sequence, token: int) -> None:
        sequence.ids.append(token)
        self.decode.receive(sequence)
        blocks, _ = self._source.export(sequence.key)
        self._target.import_blocks(sequence.key, (self._source.tensor[block] for block in blocks), sequence.tokens - 1)
        self.decode.join(sequence.key)
        self.prefill.release(sequence.key)


def contiguous(model: Model, cache: bool) -> ContiguousKv:
    return ContiguousKv(model.geometry, BlockPool(BLOCKS), BLOCK, cache)


def engine_on(model: Model, store: KvStore, chunk: int) -> Engine:
    return Engine(model, store, EngineConfig(model=Path("any"), num_blocks=BLOCKS, prefill_chunk=chunk))


def places(model: Model) -> list[Place]:
    """Chunks end anywhere in blocks of 16 and in the attention's blocks of 64, or nowhere at all."""
    return [Unified(model, 7, True), Unified(model, 512, False), Split(model, 23, True), Split(model, 64, False)]


@dataclass(frozen=True)
class Job:
    prompt: tuple[int, ...]
    sampling: Sampling


@dataclass
class Answer:
    """What stands, and what a client has of it."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    text: str = ""
    finish: FinishReason | None = None


class Fate:
    """One job from attempt to attempt. `met` counts what its cuts went through."""

    def __init__(self, job: Job, tokenizer: Tokenizer, draw: Random, met: Counter[str]) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._draw = draw
        self._met = met
        self._continues = continues_text(job.prompt, tokenizer)
        self._relay = Assembler(tokenizer, job.sampling.stop, continues=self._continues)
        self._epoch = 0
        self.answer = Answer()

    def attempt(self, place: Place, most: int) -> None:
        """Run in `place` until the end, or for `most` tokens; then it is preempted."""
        self._epoch += 1
        answer, sampling = self.answer, self._job.sampling
        matcher = StopMatcher(sampling.stop, self._tokenizer, continues=self._continues)
        for token in answer.ids:
            matcher.push(token)
        key = f"job@{self._epoch}"
        place.begin(Sequence(key, self._job.prompt, sampling, list(answer.ids)))
        for new in _tokens_of(key, place, most):
            answer.ids.append(new.token)
            answer.logprobs.append(new.note.logprobs)
            if delta := self._relay.push([new.token]):
                answer.text += delta.text
            ended = FinishReason.STOP if matcher.push(new.token) else new.finish
            if ended is not None:
                answer.finish = ended
                answer.text += self._relay.finish(ended).text
                break
        place.clear()

    def preempt(self) -> None:
        """Keep what was delivered, or more of what stands, up to all of it."""
        answer = self.answer
        delivered, all_ = self._relay.delivered, len(answer.ids)
        kept = self._draw.choice((delivered, self._draw.randint(delivered, all_), all_))
        self._relay.rewind(kept)
        del answer.ids[kept:], answer.logprobs[kept:]
        text = self._tokenizer.decode(answer.ids)
        self._met["inside a character"] += text.endswith("\ufffd")
        stops = self._job.sampling.stop
        self._met["inside a stop string"] += any(text.endswith(stop[:n]) for stop in stops for n in range(1, len(stop)))
        self._met["tokens discarded"] += kept < all_
        self._met["cuts"] += 1


def _tokens_of(key: str, place: Place, most: int) -> Iterator[NewToken]:
    count = 0
    while count < most:
        for new in place.step():
            if new.key == key:
                count += 1
                yield new
                if new.finish is not None:
                    return


def alone(model: Model, tokenizer: Tokenizer, job: Job) -> Answer:
    """Its answer where it is prefilled in one piece and nothing else runs."""
    fate = Fate(job, tokenizer, Random(0), Counter())
    fate.attempt(Unified(model, 512, False), job.sampling.max_tokens + 1)
    return fate.answer


def disturbed(tokenizer: Tokenizer, job: Job, somewhere: list[Place], draw: Random, met: Counter[str]) -> Answer:
    """Its answer after attempts of a few tokens each, in company, each somewhere."""
    fate = Fate(job, tokenizer, draw, met)
    while fate.answer.finish is None:
        place = draw.choice(somewhere)
        before = place.hits
        for number in range(draw.randint(0, 2)):
            begin = draw.randint(0, len(job.prompt) - 1)
            neighbour = (*job.prompt[:begin], *job.prompt[: draw.randint(1, 40)])
            place.begin(Sequence(f"neighbour {number}", neighbour, replace(job.sampling, max_tokens=100, seed=number)))
        fate.attempt(place, draw.randint(1, 9))
        met["hits"] += place.hits > before
        if fate.answer.finish is None:
            fate.preempt()
    met[str(fate.answer.finish)] += 1
    return fate.answer


def jobs(tokenizer: Tokenizer, draw: Random, count: int, greedy: bool, tokens: int = 32) -> Iterator[Job]:
    """Prompts that begin alike up to any place, and answers of a few letters, one of which is two tokens."""
    letters = ["Ã", "©", "a", "b", "Ġ"]  # the first two are the bytes of é
    ids = [tokenizer.token_id(letter) for letter in letters]
    bias = tuple((token, 1000.0) for token in ids if token is not None)  # nothing else comes
    assert len(bias) == len(letters)
    ordinary = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids]
    common = draw.choices(ordinary, k=100)
    for number in range(count):
        own = draw.choices(ordinary, k=draw.choice((0, 0, BLOCK)))  # the same blocks after another beginning
        prompt = (*own, *common[: draw.randint(0, 100)], *draw.choices(ordinary, k=draw.randint(1, 30)))
        chosen = {"temperature": 0.0, "frequency_penalty": 2.0} if greedy else {"temperature": 30.0, "seed": number}
        sampling = Sampling(tokens, ignore_eos=True, logit_bias=bias, logprobs=2, **chosen)  # type: ignore[arg-type]
        yield Job(prompt, sampling)


def check_jobs(model: Model, tokenizer: Tokenizer, seed: int, count: int, greedy: bool) -> Counter[str]:
    """Every disturbed job is what it is alone, bit for bit; return what they went through."""
    assert model.exact, model.exactness
    draw, met = Random(seed), Counter[str]()
    somewhere = places(model)
    for number, job in enumerate(jobs(tokenizer, draw, count, greedy)):
        undisturbed = alone(model, tokenizer, job)
        if number % 2:
            job = with_stops(job, undisturbed.text, draw)
            undisturbed = alone(model, tokenizer, job)
        assert disturbed(tokenizer, job, somewhere, draw, met) == undisturbed, job
    return met


def with_stops(job: Job, text: str, draw: Random) -> Job:
    """The same with stop strings: one that occurs in its text, not at once, and one that begins at each letter."""
    places = [n for n in range(6, len(text) - 3) if "\ufffd" not in text[n : n + 3]]
    found = text[(n := draw.choice(places)) : n + 3] if places else "b é"
    return replace(job, sampling=replace(job.sampling, stop=(found, *(f"{letter}x" for letter in "é ab"))))
