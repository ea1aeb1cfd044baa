"""The engine: sequences come in, `step()` computes one batch over all of them, tokens come out."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from prelay_queue.job import FinishReason
from prelay_queue.note import Note, TokenLogprobs

from .attention import Span
from .blocks import BlockState
from .config import EngineConfig
from .errors import Abandoned, ConfigError, EngineError, NoRoom, OutOfMemory, UnknownSequence
from .flag import Flag
from .kv import KvStore
from .logprobs import Floats, logprobs_of
from .model import Model
from .native.lib import Kernels
from .pace import Pace
from .prefix import Chain
from .sampler import NO_TOKEN, Draw
from .scheduler import BATCH, Plan, Row, schedule
from .sequence import NOTHING, NewToken, Sequence, Step
from .shrink import NO_MEMORY, Shrink
from .stats import BlockStats

log = logging.getLogger("prelay.engine")


class Phase(StrEnum):
    PREFILL = "prefill"  # its known tokens are being computed
    DECODE = "decode"  # all but the last token are computed; each step feeds that one
    COPYING = "copying"  # its keys are being copied in
    HELD = "held"  # prefilled here, waiting to be copied away
    DROPPED = "dropped"  # forgotten, but a copy may still write into its blocks


@dataclass(slots=True)
class _Entry:
    sequence: Sequence
    phase: Phase
    computed: int  # positions whose keys and values stand in the store
    chain: Chain | None = None  # the names of its full blocks, where those are cached
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of its tokens from the second on


#: A sequence, the token drawn for it, and what is said of that.
_Drawn = tuple[_Entry, int, Note]


class Engine:
    """Prefill, decode or both over one KV store. All methods are for one thread.

    A sequence comes in by `add`, to be prefilled here, or by `receive` and `join`, with keys that somebody else
    computed. It leaves when it finishes, is evicted, dropped, or (hand_over) released; then everything it held
    is free again.
    """

    def __init__(self, model: Model, kv: KvStore, config: EngineConfig) -> None:
        if kv.block_size != config.block_size:
            raise ConfigError("block_size", f"the KV store's {kv.block_size}", config.block_size)
        self._model = model
        self._kv = kv
        self._config = config
        self._ends = tuple(sorted(model.eos_ids))
        self._pace = Pace(config.prefill_chunk, config.batch_step_ms)
        self._shrink = Shrink(config.prefill_chunk, config.max_running, config.block_size)
        self._entries: dict[str, _Entry] = {}
        #: Positions that went through the model, since the start.
        self.computed_tokens = 0
        #: Tokens that came to be prefilled while a prefix cache was on, and those of them that it held.
        self.prefix_queries = 0
        self.prefix_hits = 0
        #: Steps that ran out of memory.
        self.out_of_memory = 0

    # Admission

    def fits(self, total_tokens: int) -> bool:
        """Whether a sequence of so many tokens, prompt and answer, could ever be held, alone."""
        return total_tokens <= self._model.context_len and self._kv.blocks_for(total_tokens) <= self._kv.pool.size

    def room(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens should be admitted now."""
        return self._slot_free() and self._kv.blocks_for(tokens) <= self.spare

    @property
    def spare(self) -> int:
        """Blocks for admissions; below 0 when there are too few for what runs.

        One block is left free for each running sequence that may still ask for one, so that an admission does
        not evict somebody at once.
        """
        return self._kv.pool.available - sum(map(_grows, self._entries.values()))

    def gives(self, key: str) -> int:
        """Blocks by which `spare` grows when `key` is dropped or released."""
        return self._kv.pool.alone(key) + _grows(self._entries[key])

    def add(self, sequence: Sequence) -> None:
        """Prefill prompt + ids here, then decode or hold. Takes all blocks for that now, or raises NoRoom.

        What the prefix cache has of them is not computed, except the last token: somebody must give the next one.
        """
        entry = _Entry(sequence, Phase.PREFILL, computed=0)
        if self._kv.prefix_cache:
            entry.chain = Chain(partial(_tokens, sequence), self._config.block_size)
        found = self._admit(entry, BlockState.IN_USE, self._names(entry))
        self.prefix_queries += sequence.tokens if entry.chain is not None else 0
        self._skip(entry, found)

    def receive(self, sequence: Sequence) -> None:
        """Make place for keys that are to be copied in: those of all tokens but the last.

        The blocks are COPYING until `join`, or after a `drop` until `copied`. Raises NoRoom.
        """
        if not sequence.ids:
            raise EngineError(f"{sequence.key} has no token to feed: a received sequence has at least one id")
        self._admit(_Entry(sequence, Phase.COPYING, sequence.tokens - 1), BlockState.COPYING)

    def _admit(self, entry: _Entry, state: BlockState, names: Iterable[bytes] = ()) -> int:
        """Take blocks; returns how many positions stand in those that others have written."""
        sequence = entry.sequence
        if sequence.key in self._entries:
            raise EngineError(f"{sequence.key} is already here")
        if not sequence.prompt_ids or len(sequence.ids) >= sequence.sampling.max_tokens:
            raise EngineError(f"{sequence.key} has an empty prompt or nothing left to generate")
        if sequence.tokens >= self._model.context_len:
            raise EngineError(
                f"{sequence.key} has {sequence.tokens} tokens, the context holds {self._model.context_len}"
            )
        if not self._slot_free():
            raise NoRoom(f"max_running: all {self._config.max_running} slots are taken")
        limit = min(sequence.total, self._model.context_len)
        tokens = limit if sequence.reserved else sequence.tokens
        found = self._kv.open(sequence.key, tokens, limit, state, names)
        self._entries[sequence.key] = entry
        return found

    def _names(self, entry: _Entry) -> Iterator[bytes]:
        """The names of the blocks that it has not computed and may have from others, in order."""
        if entry.chain is not None:
            size = self._config.block_size
            for index in range(entry.computed // size, _shareable(entry.sequence, size)):
                yield entry.chain[index]

    def _skip(self, entry: _Entry, computed: int) -> None:
        """All before position `computed` stands: others have computed it."""
        self.prefix_hits += computed - entry.computed
        entry.sequence.hits += computed - entry.computed
        entry.computed = computed

    def _slot_free(self) -> bool:
        return self.running + self.waiting < self._config.max_running

    # The life of a sequence

    def join(self, key: str) -> None:
        """The copy of a received sequence has ended: it decodes from the next step on, feeding its last id."""
        entry = self._entry(key, Phase.COPYING)
        self._kv.pool.move(key, BlockState.IN_USE)
        entry.phase = Phase.DECODE

    def drop(self, key: str) -> bool:
        """Forget a sequence and free its blocks; whether it was here.

        While it is being copied in, the blocks stay COPYING until `copied`.
        """
        entry = self._entries.get(key)
        if entry is None or entry.phase is Phase.DROPPED:
            return False
        if entry.phase is Phase.COPYING:
            entry.phase = Phase.DROPPED
        else:
            self._forget(key)
        return True

    def copied(self, key: str) -> None:
        """The copying thread has let go of `key`. Frees the blocks if it was dropped; else nothing happens."""
        entry = self._entries.get(key)
        if entry is not None and entry.phase is Phase.DROPPED:
            self._kv.pool.move(key, BlockState.IN_USE)
            self._forget(key)

    def release(self, key: str) -> None:
        """Give the blocks of a held sequence back. Raises UnknownSequence for any other."""
        self._entry(key, Phase.HELD)
        self._forget(key)

    def _entry(self, key: str, phase: Phase) -> _Entry:
        entry = self._entries.get(key)
        if entry is None or entry.phase is not phase:
            raise UnknownSequence(f"{key} is {entry.phase if entry else 'not here'}, not {phase}")
        return entry

    def _forget(self, key: str) -> None:
        self._kv.close(key)
        del self._entries[key]

    # One step

    def step(self, urgent: Flag | None = None) -> Step:
        """1. Skip what others have computed meanwhile, and decide. 2. Evict. 3. Let decoding rows take their blocks.
        4. Compute one batch: decoding rows, then chunks of prompts. 5. Sample for rows that end a sequence's known
        tokens. 6. Name the blocks that are full now. 7. Finish or hold. Returns at once when nothing runs.

        `urgent` is set by any thread when somebody comes for whom batch work is to be left: a step that has nothing
        else is then abandoned, and computed again later.

        A step that runs out of memory has computed nothing. The next one is smaller: see `shrink.py` for who is
        evicted for that, or, running alone, ends with an error. What the rows took in 3 stays theirs.
        """
        if not self.has_work:
            return Step()
        self._skip_known()  # 1
        rows = self._rows()
        plan = schedule(rows, self._kv.pool.available, self._shrink.limits(self._pace.limits(rows)))
        for key in plan.evicted:  # 2
            self._forget(key)
        for key in plan.decode:  # 3
            self._kv.grow(key, self._entries[key].sequence.tokens)
        spans = self._spans(plan)
        if not spans:
            return Step(evicted=plan.evicted)
        begun = time.perf_counter()
        try:
            drawn = self._compute(spans, urgent if self._may_abandon(plan) else None)  # 4, 5
        except Abandoned:
            self._pace.abandoned()
            return Step(evicted=plan.evicted)
        except OutOfMemory as error:
            return self._made_smaller(rows, plan, str(error))
        self._pace.ran(rows, plan, 1000 * (time.perf_counter() - begun))
        self._shrink.ran()
        self._name(spans)  # 6
        new = tuple(self._apply(*each) for each in drawn)  # 7
        held = tuple(entry.sequence.key for entry, _, _ in drawn if entry.phase is Phase.HELD)
        return Step(new, plan.evicted, held)

    def _made_smaller(self, rows: Rows[Row], plan: Plan, why: str) -> Step:
        """What a step did that ran out of memory."""
        self.out_of_memory += 1
        remedy = self._shrink.failed(rows, plan)
        log.warning("a step ran out of memory (%s): %s, %r", why, remedy, self._shrink)
        if remedy.evicted is not None:
            self._forget(remedy.evicted)
            return Step(evicted=(*plan.evicted, remedy.evicted))
        if remedy.ended is not None:
            ended = self._apply(self._entries[remedy.ended], NO_MEMORY, NOTHING)
            return Step((ended,), plan.evicted)
        return Step(evicted=plan.evicted)

    def _may_abandon(self, plan: Plan) -> bool:
        keys = (*plan.decode, *(chunk.key for chunk in plan.chunks))
        return self._pace.may_abandon and all(self._entries[key].sequence.priority >= BATCH for key in keys)

    def _skip_known(self) -> None:
        """Two that begin alike may have come together: the second has what the first computed after both came."""
        size = self._config.block_size
        for entry in self._in_phase(Phase.PREFILL):
            index = entry.computed // size
            for name in self._names(entry):
                if not self._kv.share(entry.sequence.key, index, name):
                    break
                index += 1
                self._skip(entry, index * size)

    def _name(self, spans: Rows[Span]) -> None:
        for span in spans:
            chain, size = self._entries[span.key].chain, self._config.block_size
            first, stop = span.start // size, (span.start + span.length) // size
            if chain is not None and first < stop:
                self._kv.name(span.key, chain, first, stop)

    def _rows(self) -> list[Row]:
        return [self._row(entry) for entry in self._in_phase(Phase.PREFILL, Phase.DECODE)]

    def _row(self, entry: _Entry) -> Row:
        sequence, prefill = entry.sequence, entry.phase is Phase.PREFILL
        pool = self._kv.pool
        return Row(
            key=sequence.key,
            priority=sequence.priority,
            arrival_ms=sequence.arrival_ms,
            reserved=sequence.reserved,
            todo=sequence.tokens - entry.computed if prefill else 0,
            needs=0 if prefill else max(0, self._kv.blocks_for(sequence.tokens) - pool.count(sequence.key)),
            holds=pool.alone(sequence.key),
        )

    def _spans(self, plan: Plan) -> list[Span]:
        """Of one row first, as `Model.forward` wants them."""
        spans = [Span(key, self._entries[key].computed, 1) for key in plan.decode]
        spans += [Span(chunk.key, self._entries[chunk.key].computed, chunk.tokens) for chunk in plan.chunks]
        return sorted(spans, key=lambda span: span.length > 1)

    def _compute(self, spans: Rows[Span], abandon: Flag | None) -> list[_Drawn]:
        """The sequences whose last known token was computed, each with a token and what is said of it."""
        ids: list[int] = []
        ending, wanted = [], []
        asked: list[tuple[_Entry, int]] = []  # for the log-probability of this position of its prompt
        rows: list[int] = []  # that give those
        for span in spans:
            entry = self._entries[span.key]
            known = _reported(entry.sequence, span)
            asked += [(entry, position + 1) for position in known]
            rows += [len(ids) + position - span.start for position in known]
            ids += _tokens(entry.sequence, span.start, span.length)
            if span.start + span.length == entry.sequence.tokens:
                ending.append(entry)
                wanted.append(len(ids) - 1)
        draws = [(row, self._draw(entry.sequence)) for row, entry in zip(wanted, ending, strict=True)]
        told = [row for row, entry in zip(wanted, ending, strict=True) if entry.sequence.sampling.logprobs >= 0]
        found = self._model.step(self._kv, spans, ids, draws, [*rows, *told], abandon)
        self.computed_tokens += len(ids)
        for span in spans:
            self._entries[span.key].computed += span.length
        for row, (entry, position) in zip(rows, asked, strict=True):
            sequence = entry.sequence
            token, count = sequence.prompt_ids[position], sequence.sampling.prompt_logprobs
            entry.prompt_logprobs.append(logprobs_of(found.logits[row], token, count, self._model.kernels))
        notes = [
            _note(self._model.kernels, entry, found.logits.get(row), token)
            for row, entry, token in zip(wanted, ending, found.tokens, strict=True)
        ]
        return list(zip(ending, found.tokens, notes, strict=True))

    def _draw(self, sequence: Sequence) -> Draw:
        ids = sequence.ids
        return Draw(sequence.sampling, len(ids), sequence.prompt_ids, ids, self._ends)

    def _apply(self, entry: _Entry, token: int, note: Note) -> NewToken:
        sequence = entry.sequence
        sequence.ids.append(token)
        finish = self._finish(sequence, token)
        if finish is not None:
            self._forget(sequence.key)
            if token == NO_TOKEN and entry.chain is not None:  # nobody is to find them
                self._kv.pool.retract(entry.chain.digests)
        elif sequence.hand_over:
            entry.phase = Phase.HELD
            self._kv.pool.move(sequence.key, BlockState.HELD)
        else:
            entry.phase = Phase.DECODE
        return NewToken(sequence.key, len(sequence.ids) - 1, token, finish, note)

    def _finish(self, sequence: Sequence, token: int) -> FinishReason | None:
        sampling = sequence.sampling
        if token in (NO_TOKEN, NO_MEMORY):
            return FinishReason.ERROR
        if token in sampling.stop_token_ids or (token in self._model.eos_ids and not sampling.ignore_eos):
            return FinishReason.STOP
        if len(sequence.ids) >= sampling.max_tokens or sequence.tokens >= self._model.context_len:
            return FinishReason.LENGTH
        return None

    # What it holds

    @property
    def running(self) -> int:
        """Sequences being prefilled or decoded."""
        return len(self._in_phase(Phase.PREFILL, Phase.DECODE))

    @property
    def waiting(self) -> int:
        """Sequences being copied in, also those dropped meanwhile."""
        return len(self._in_phase(Phase.COPYING, Phase.DROPPED))

    @property
    def held(self) -> int:
        """Prefilled sequences that wait to be copied away; they take blocks but no slot."""
        return len(self._in_phase(Phase.HELD))

    @property
    def has_work(self) -> bool:
        """Whether `step` would compute something."""
        return self.running > 0

    def stats(self) -> BlockStats:
        return self._kv.pool.stats(self._entries)

    def _in_phase(self, *phases: Phase) -> list[_Entry]:
        return [entry for entry in self._entries.values() if entry.phase in phases]

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{key}: {entry.phase} {entry.computed}/{entry.sequence.tokens}" for key, entry in self._entries.items()
        )
        return f"<Engine {self._kv.pool.free}/{self._kv.pool.size} blocks free; {shown or 'empty'}>"


def _reported(sequence: Sequence, span: Span) -> range:
    """The positions of a span whose rows say how likely the prompt's next token was, if that is asked for.

    An attempt that goes on from ids has no need: it stands in the note of the first of them.
    """
    if sequence.sampling.prompt_logprobs < 0 or sequence.ids:
        return range(0)
    return range(span.start, min(span.start + span.length, len(sequence.prompt_ids) - 1))


def _note(kernels: Kernels | None, entry: _Entry, row: Floats | None, token: int) -> Note:
    """What is said of a token that was drawn from a row of logits [vocabulary], given where they are asked for."""
    sequence = entry.sequence
    count = sequence.sampling.logprobs
    own = logprobs_of(row, token, count, kernels) if row is not None and count >= 0 and token != NO_TOKEN else None
    if sequence.ids:
        return Note(own) if own else NOTHING
    return Note(own, tuple(entry.prompt_logprobs), sequence.hits)


def _grows(entry: _Entry) -> bool:
    """Whether it runs, and may ask for one more block."""
    sequence = entry.sequence
    return entry.phase in (Phase.PREFILL, Phase.DECODE) and not (sequence.reserved or sequence.hand_over)


def _shareable(sequence: Sequence, block_size: int) -> int:
    """How many of its first blocks may be another's: not that of the last token, which gives the next one."""
    if sequence.sampling.prompt_logprobs >= 0 and not sequence.ids:
        return 0  # each token of the prompt is to be computed
    return (sequence.tokens - 1) // block_size


def _tokens(sequence: Sequence, start: int, count: int) -> list[int]:
    """Tokens [start, start + count) of prompt and answer."""
    prompt = len(sequence.prompt_ids)
    if start >= prompt:
        return sequence.ids[start - prompt : start - prompt + count]
    return [*sequence.prompt_ids[start : start + count], *sequence.ids[: max(0, start + count - prompt)]]


__all__ = ["Engine", "NewToken", "Phase", "Sequence", "Step"]
