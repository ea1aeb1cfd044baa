"""What goes into the engine and what a step gives back. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field

from prelay_queue.job import FinishReason, Sampling
from prelay_queue.note import Note

#: What is said of most tokens.
NOTHING = Note()


@dataclass(slots=True)
class Sequence:
    """One attempt of one job, as the engine holds it. The engine appends to `ids`.

    `key` is unique for ever: `<job id>@<epoch>`. `ids` are the tokens of the answer so far, seq 0 first.
    """

    key: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    ids: list[int] = field(default_factory=list)
    priority: int = 1  # 0 interactive, 1 normal, 2 batch
    arrival_ms: int = 0
    reserved: bool = False  # takes the KV of its whole answer at admission and is never evicted
    hand_over: bool = False  # prefill worker: stop after the first sampled token and hold the blocks
    hits: int = 0  # positions that it need not compute: the engine found them in its prefix cache

    @property
    def tokens(self) -> int:
        """Prompt and answer so far."""
        return len(self.prompt_ids) + len(self.ids)

    @property
    def total(self) -> int:
        """The most tokens this sequence can come to."""
        return len(self.prompt_ids) + self.sampling.max_tokens


@dataclass(frozen=True, slots=True)
class NewToken:
    """One sampled token. `finish` is set on the last one of a sequence, which the engine then forgets."""

    key: str
    seq: int
    token: int
    finish: FinishReason | None = None
    note: Note = NOTHING


@dataclass(frozen=True, slots=True)
class Step:
    """What one step did.

    `evicted` sequences are gone and their blocks free; their tokens of this step, if any, are not computed.
    `held` are the hand-over sequences whose prefill is complete: their first token is in `tokens`, and
    their blocks stay until `Engine.release`.
    """

    tokens: tuple[NewToken, ...] = ()
    evicted: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
