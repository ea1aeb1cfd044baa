"""What the other threads tell the model loop."""

from __future__ import annotations

from dataclasses import dataclass

from prelay_queue.job import Claim

from .errors import HandoverFailed


@dataclass(frozen=True, slots=True)
class Claimed:
    """A job is ours."""

    claim: Claim


@dataclass(frozen=True, slots=True)
class Stop:
    """The attempt is over for us: cancelled, fenced, or ended by a stop string. Free what it holds; write nothing."""

    job: str
    epoch: int
    why: str


@dataclass(frozen=True, slots=True)
class Evict:
    """An operator asks for a preempt. Epoch 0 means whatever epoch runs here."""

    job: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Exported:
    """The hand-over stands in Redis: from now on the job waits, or runs, elsewhere."""

    key: str


@dataclass(frozen=True, slots=True)
class Release:
    """Nobody will read the export of (job, epoch) any more."""

    job: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy thread has ended with `key`, well or badly."""

    key: str
    error: HandoverFailed | None = None


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no new work, give back what runs, and end."""


Message = Claimed | Stop | Evict | Exported | Release | Copied | Drain


def key_of(job: str, epoch: int) -> str:
    """Name one attempt inside a worker."""
    return f"{job}@{epoch}"
