"""The null model: the whole protocol with no torch, in a process that starts in a third of a second.

Its next token is a hash of all tokens before it, so a wrong resume gives a wrong chain; in divergent mode also of the
epoch, so that a resume which keeps the wrong tokens cannot hide behind an identical regeneration.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson

from prelay_engine.flag import Flag
from prelay_engine.sequence import NOTHING, NewToken, Sequence, Step
from prelay_engine.stats import BlockStats
from prelay_queue import failpoints
from prelay_queue.job import FinishReason
from prelay_queue.note import Note, TokenLogprobs

from .backend import Backend, Transport
from .config import NullModel, Role, WorkerConfig
from .errors import HandoverBroken, HandoverStale, StartupError


def null_token(prefix: Iterable[int], epoch: int | None, vocab_size: int) -> int:
    """Return the token after `prefix` (prompt and answer so far); `epoch` is None outside divergent mode."""
    digest = _chain()
    for token in prefix:
        digest.update(token.to_bytes(4, "little"))
    return _token(digest, epoch, vocab_size)


def null_logprob(token: int) -> float:
    """Return what the null model says of a token, wherever it stands: so a note at a wrong place shows."""
    return -(token % 1000) / 8


def null_note(sequence: Sequence, token: int) -> Note:
    """Return the note of a token that was appended to `sequence`, as a real model would write it."""
    sampling = sequence.sampling
    own = _null_logprobs(token, sampling.logprobs) if sampling.logprobs >= 0 else None
    if sampling.prompt_logprobs < 0 or len(sequence.ids) > 1:
        return Note(own) if own else NOTHING
    return Note(own, tuple(_null_logprobs(each, sampling.prompt_logprobs) for each in sequence.prompt_ids[1:]))


def _null_logprobs(token: int, count: int) -> TokenLogprobs:
    return TokenLogprobs(null_logprob(token), 1, tuple((token, null_logprob(token)) for _ in range(count)))


def _chain() -> Any:
    return hashlib.blake2b(digest_size=8)


def _token(digest: Any, epoch: int | None, vocab_size: int) -> int:
    if epoch is not None:
        digest.update(f"epoch {epoch}".encode())
    return int.from_bytes(digest.digest(), "little") % vocab_size


@dataclass(slots=True)
class _Running:
    sequence: Sequence
    blocks: int
    state: str  # prefill | held | copying | decode
    dropped: bool = False
    generations: list[int] = field(default_factory=list)
    hashed: int = 0  # tokens that `chain` has taken in
    chain: Any = field(default_factory=_chain)

    @property
    def grows(self) -> bool:
        """Whether it runs, and may ask for one more block."""
        return self.state in ("prefill", "decode") and not (self.sequence.reserved or self.sequence.hand_over)

    def next_token(self, epoch: int | None, vocab_size: int) -> int:
        """`null_token` of all tokens so far, without hashing each of them again."""
        prompt, ids = self.sequence.prompt_ids, self.sequence.ids
        for token in (*prompt[self.hashed :], *ids[max(0, self.hashed - len(prompt)) :]):
            self.chain.update(token.to_bytes(4, "little"))
        self.hashed = len(prompt) + len(ids)
        return _token(self.chain.copy(), epoch, vocab_size)


class NullEngine:
    """Stands behind `EngineLike`: real admission, blocks, eviction and hand-over states, no arithmetic."""

    def __init__(self, model: NullModel, num_blocks: int, block_size: int, max_running: int) -> None:
        self._model = model
        self._total = num_blocks
        self._block_size = block_size
        self._max_running = max_running
        self._held: dict[str, _Running] = {}
        self._states: Counter[str] = Counter()  # how many of `_held` are in each
        self._growing = 0  # how many of `_held` may ask for one more block
        self._used = 0  # blocks of all of `_held`
        self._generation = 0
        self.computed_tokens = 0
        self.prefix_queries = self.prefix_hits = 0  # it caches nothing

    def __repr__(self) -> str:
        return f"NullEngine({self.stats()}, {[(k, r.state) for k, r in self._held.items()]})"

    @property
    def running(self) -> int:
        return self._states["decode"]

    @property
    def waiting(self) -> int:
        return self._states["prefill"] + self._states["copying"]

    @property
    def has_work(self) -> bool:
        return self._states["prefill"] + self._states["decode"] > 0

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _free(self) -> int:
        return self._total - self._used

    def fits(self, total_tokens: int) -> bool:
        return self._blocks(total_tokens) <= self._total

    def room(self, tokens: int) -> bool:
        return self._blocks(tokens) <= self.spare and self.running + self.waiting < self._max_running

    @property
    def spare(self) -> int:
        return self._free() - self._growing

    def gives(self, key: str) -> int:
        return self._held[key].blocks + self._held[key].grows

    def _take(self, sequence: Sequence, state: str) -> None:
        tokens = len(sequence.prompt_ids) + len(sequence.ids)
        if sequence.reserved:
            tokens = len(sequence.prompt_ids) + sequence.sampling.max_tokens
        assert self.room(tokens), "the worker asks for room first"
        self._generation += 1
        blocks = self._blocks(tokens)
        running = self._held[sequence.key] = _Running(sequence, blocks, state, generations=[self._generation])
        self._count(running, 1)
        self._used += blocks

    def _count(self, running: _Running, by: int) -> None:
        self._states[running.state] += by
        self._growing += by * running.grows

    def _enter(self, running: _Running, state: str) -> None:
        self._count(running, -1)
        running.state = state
        self._count(running, 1)

    def _let_go(self, key: str) -> None:
        running = self._held.pop(key)
        self._count(running, -1)
        self._used -= running.blocks

    def add(self, sequence: Sequence) -> None:
        self._take(sequence, "prefill")

    def receive(self, sequence: Sequence) -> None:
        self._take(sequence, "copying")

    def join(self, key: str) -> None:
        self._enter(self._held[key], "decode")

    def drop(self, key: str) -> bool:
        running = self._held.get(key)
        if running is None:
            return False
        if running.state == "copying":
            running.dropped = True
        else:
            self._let_go(key)
        return True

    def copied(self, key: str) -> None:
        running = self._held.get(key)
        if running is not None and running.dropped:
            self._let_go(key)

    def release(self, key: str) -> None:
        if key in self._held:
            self._let_go(key)

    def generation(self, key: str) -> int:
        return self._held[key].generations[0]

    def stats(self) -> BlockStats:
        copying = sum(r.blocks for r in self._held.values() if r.state == "copying")
        free = self._free()
        return BlockStats(self._total, free, copying, leased=self._total - free - copying)

    def step(self, urgent: Flag | None = None) -> Step:  # noqa: ARG002 - its steps are short
        active = [r for r in self._held.values() if r.state in ("prefill", "decode")]
        self._suffer(active)
        prefilled = self._prefilled(active)
        self.computed_tokens += prefilled + sum(r.state == "decode" for r in active)
        time.sleep((self._model.step_ms + self._model.prefill_ms_per_token * prefilled) / 1000)
        evicted: list[str] = []
        tokens: list[NewToken] = []
        held: list[str] = []
        for running in active:
            if running.sequence.key in evicted or not self._grow(running, evicted):
                continue
            tokens.append(self._sample(running))
            self._settle(running, tokens[-1], held)
        return Step(tuple(t for t in tokens if t.key not in evicted), tuple(evicted), tuple(held))

    def _suffer(self, active: list[_Running]) -> None:
        poison = self._model.poison_token
        if poison is not None and any(poison in running.sequence.prompt_ids for running in active):
            os.kill(os.getpid(), signal.SIGKILL)

    def _prefilled(self, active: list[_Running]) -> int:
        return sum(len(r.sequence.prompt_ids) + len(r.sequence.ids) for r in active if r.state == "prefill")

    def _grow(self, running: _Running, evicted: list[str]) -> bool:
        """Take one more block when this step needs it, evicting the latest of the lowest class. False: itself."""
        sequence = running.sequence
        if running.state != "decode" or sequence.reserved:
            return True
        need = self._blocks(len(sequence.prompt_ids) + len(sequence.ids) + 1)
        while need > running.blocks and self._free() < need - running.blocks:
            victims = [r for r in self._held.values() if r.state == "decode" and not r.sequence.reserved]
            victim = max(victims, key=lambda r: (r.sequence.priority, r.sequence.arrival_ms, r.sequence.key))
            evicted.append(victim.sequence.key)
            self._let_go(victim.sequence.key)
            if victim is running:
                return False
        more = max(0, need - running.blocks)
        running.blocks += more
        self._used += more
        return True

    def _sample(self, running: _Running) -> NewToken:
        sequence = running.sequence
        epoch = int(sequence.key.rpartition("@")[2]) if self._model.divergent else None
        token = running.next_token(epoch, self._model.vocab_size)
        sequence.ids.append(token)
        finish, sampling = None, sequence.sampling
        eos = () if sampling.ignore_eos else self._model.eos_ids
        if token in (*eos, *sampling.stop_token_ids):
            finish = FinishReason.STOP
        elif len(sequence.ids) >= sampling.max_tokens:
            finish = FinishReason.LENGTH
        return NewToken(sequence.key, len(sequence.ids) - 1, token, finish, null_note(sequence, token))

    def _settle(self, running: _Running, new: NewToken, held: list[str]) -> None:
        if new.finish is not None:
            self._let_go(new.key)
        elif running.sequence.hand_over:
            self._enter(running, "held")
            held.append(new.key)
        else:
            self._enter(running, "decode")


class NullTransport(Transport):
    """Hands over nothing but a checksum of what the KV would hold."""

    def __init__(self, domain: str, engine: NullEngine) -> None:
        self.domain = domain
        self._engine = engine

    def export(self, key: str, tokens: int) -> bytes:
        return orjson.dumps({"null": key.rpartition("@")[0], "tokens": tokens, "gen": self._engine.generation(key)})

    def fetch(self, kv: bytes, key: str, tokens: int) -> None:
        failpoints.hit("copy.before")
        try:
            ref = orjson.loads(kv)
            job, exported = ref["null"], ref["tokens"]
        except (ValueError, KeyError, TypeError) as error:
            raise HandoverBroken(f"cannot read the KV reference ({error}): {kv[:200]!r}") from None
        if job != key.rpartition("@")[0] or exported != tokens:
            raise HandoverStale(f"the export is of {job} with {exported} tokens, not {key} with {tokens}")
        failpoints.hit("copy.after")


def null_backend(config: WorkerConfig) -> Backend:
    """Build the null model's backend. Decode workers of one host share one domain, as real ones do."""
    if config.null is None:
        raise StartupError("null_backend needs a NullModel")
    engine = NullEngine(config.null, config.kv_blocks, config.block_size, config.max_running)
    domain = "null" if config.role is not Role.UNIFIED else "null-unified"
    context = config.max_model_len or config.kv_blocks * config.block_size
    return Backend(engine, NullTransport(domain, engine), config.block_size, config.kv_blocks, context, "null", {})
