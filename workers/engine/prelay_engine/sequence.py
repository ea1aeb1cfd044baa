"""What goes into the engine and what comes out of a step. No torch here: workers without a model import this too."""

from __future__ import annotations

from dataclasses import dataclass, field

from prelay_queue.job import FinishReason, Sampling


@dataclass(slots=True)
class Sequence:
    """One job at one epoch. `key` is unique: f"{job id}@{epoch}". `ids` grows as tokens are sampled (seq 0 …)."""

    key: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    ids: list[int] = field(default_factory=list)
    priority: int = 1  # 0 interactive, 1 normal, 2 batch
    arrival_ms: int = 0
    reserved: bool = False  # its full remaining KV was taken at admission; never evicted
    hand_over: bool = False  # prefill worker: stop after the first sampled token and hold the blocks


@dataclass(frozen=True, slots=True)
class NewToken:
    """A sampled token. `finish` is STOP at EOS or a stop id, LENGTH at max_tokens, else None."""

    key: str
    seq: int
    token: int
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What one step did. `held` are hand-over sequences whose prefill is complete (their token is in `tokens`)."""

    tokens: tuple[NewToken, ...] = ()
    evicted: tuple[str, ...] = ()
    held: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockStats:
    """Blocks of a pool. `orphaned` are owned by no live sequence: must be 0."""

    total: int
    free: int
    copying: int = 0
    leased: int = 0
    cached: int = 0
    orphaned: int = 0
