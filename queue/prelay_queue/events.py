"""What a relay hears about its jobs: the entries of its live stream, and the log read back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from .errors import BadMessageError


@dataclass(frozen=True, slots=True)
class TokensEvent:
    """Tokens seq … seq+len(ids)-1 of the answer, written by attempt `epoch`; `notes`: one for each, or none."""

    job: str
    epoch: int
    seq: int
    ids: tuple[int, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PreemptedEvent:
    """Attempt `epoch` was given up; its KV is free; the relay re-queues the job."""

    job: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class RequeuedEvent:
    """Attempt `epoch` begins at step 1; the tokens before `resume` stand, those after are gone."""

    job: str
    epoch: int
    resume: int


@dataclass(frozen=True, slots=True)
class EndedEvent:
    """The one terminal event. `count` is the number of tokens of the canonical answer."""

    job: str
    epoch: int
    count: int
    reason: str
    error: str = ""  # JSON body when reason is error


LiveEvent = TokensEvent | PreemptedEvent | RequeuedEvent | EndedEvent


def decode_live(raw: bytes) -> list[LiveEvent]:
    """Decode one live entry: a JSON list of [kind, job, epoch, …]. Raise BadMessageError if it is not one."""
    try:
        return [_decode_one(item) for item in orjson.loads(raw)]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise BadMessageError(raw, str(error)) from None


def _decode_one(item: list[Any]) -> LiveEvent:
    kind, job, epoch, *rest = item
    match kind, rest:
        case "t", [seq, ids]:
            return TokensEvent(job, epoch, seq, tuple(ids))
        case "t", [seq, ids, notes]:
            return TokensEvent(job, epoch, seq, tuple(ids), tuple(notes))
        case "p", [reason]:
            return PreemptedEvent(job, epoch, reason)
        case "r", [resume]:
            return RequeuedEvent(job, epoch, resume)
        case "e", [count, reason, error]:
            return EndedEvent(job, epoch, count, reason, error)
    raise ValueError(f"unknown event {kind!r}")


@dataclass(frozen=True, slots=True)
class LogView:
    """A job's log read back: all its tokens, and its end when it has one."""

    epoch: int  # of the job hash
    state: str
    ids: tuple[int, ...]
    resume: int  # with which `epoch` began
    reason: str = ""
    error: str = ""
    notes: tuple[str, ...] = ()  # one for each of `ids`, or none
    epochs: tuple[int, ...] = ()  # that wrote each of `ids`
