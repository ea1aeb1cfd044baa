"""The state of a batch in Redis: typed stubs of the scripts `batch_*`, which any queue client runs.

A batch is a file of requests. One runner at a time works on it: it holds a lease, and writes with (epoch, owner), as
the owner of a job does. Whoever takes the batch up after it begins the next epoch. All else about a batch, its lines
and what came of them, is on disk, and Redis may lose what it has (then `open` it again with what the disk knows).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import orjson

from .keys import Keys
from .scripts import Call, text

R = TypeVar("R")


class BatchStatus(StrEnum):
    """Where a batch is, in the words of the HTTP API. A runner moves it forward, a cancel makes it CANCELLING."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    @property
    def over(self) -> bool:
        return self in _OVER


_OVER = frozenset((BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED))
_RUNNING = frozenset((BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING))


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """How far a batch is: lines counted so far, served and refused, and the tokens of all served."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def encode(self) -> bytes:
        return orjson.dumps((self.total, self.completed, self.failed, self.prompt_tokens, self.completion_tokens))


@dataclass(frozen=True, slots=True)
class Taken:
    """Answer to `take`: ok with the epoch; held by another for `wait_ms`; over; or gone, unknown to Redis."""

    code: str
    epoch: int = 0
    wait_ms: int = 0


@dataclass(frozen=True, slots=True)
class Kept:
    """Answer to `keep`: ok, fenced, over or gone; whether to cancel; the time to the deadline, negative after it."""

    code: str
    cancel: bool = False
    left_ms: int = 0


@dataclass(frozen=True, slots=True)
class BatchState:
    """A batch as Redis has it. Moments are server ms, 0 where they have not come; `left_ms` is to the deadline."""

    record: bytes
    status: BatchStatus
    epoch: int
    owner: str
    cancel: bool
    output_file: str
    error_file: str
    errors: str
    progress: BatchProgress
    created_ms: int
    started_ms: int
    finalizing_ms: int
    cancelling_ms: int
    ended_ms: int
    deadline_ms: int
    lease_left_ms: int
    left_ms: int


def _taken(raw: Any) -> Taken:
    return Taken(text(raw[0]), int(raw[1]), int(raw[2]))


def _kept(raw: Any) -> Kept:
    return Kept(text(raw[0]), bool(int(raw[1])), int(raw[2]))


def _state(raw: Any) -> BatchState | None:
    if raw is None:
        return None
    record, status, epoch, owner, cancel, output_file, error_file, errors, *numbers = raw
    counted = [int(number or 0) for number in numbers]
    created, started, finalizing, cancelling, ended, deadline, _, lease_left, left = counted[5:]
    return BatchState(
        bytes(record), BatchStatus(text(status)), int(epoch), text(owner), bool(int(cancel)),
        text(output_file), text(error_file), text(errors), BatchProgress(*counted[:5]),
        created, started, finalizing, cancelling, ended, deadline, lease_left, left,
    )  # fmt: skip


class BatchScripts:
    """The scripts of batches of one partition. The contract of each stands at the top of its Lua file."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys

    def _call(self, name: str, decode: Callable[[Any], R], *args: str | bytes | int) -> Call[R]:
        return Call(name, self.keys.prefix, args, decode)

    def open(self, batch: str, record: bytes, left_ms: int, epoch_floor: int = 0) -> Call[str]:
        """new | exists. `left_ms` to the deadline, negative after it; epochs begin above `epoch_floor`.

        Raises QueueFull when Redis is over its memory limit.
        """
        return self._call("batch_open", text, batch, record, left_ms, epoch_floor)

    def take(self, batch: str, owner: str, lease_ms: int, epoch_floor: int = 0) -> Call[Taken]:
        """The right to run a batch: a new owner begins an epoch above the last and `epoch_floor`."""
        assert owner, "an owner has a name"
        return self._call("batch_take", _taken, batch, owner, lease_ms, epoch_floor)

    def keep(
        self, batch: str, epoch: int, owner: str, lease_ms: int, status: BatchStatus, progress: BatchProgress
    ) -> Call[Kept]:
        """Renew the lease and say how far the batch is. A lease of 0 ms gives it back: another may take it at once."""
        assert status in _RUNNING, status
        return self._call("batch_keep", _kept, batch, epoch, owner, lease_ms, status, progress.encode())

    def end(
        self,
        batch: str,
        epoch: int,
        owner: str,
        status: BatchStatus,
        progress: BatchProgress,
        output_file: str = "",
        error_file: str = "",
        errors: str = "",
    ) -> Call[str]:
        """The one end: ok | fenced | over | gone. Redis forgets the batch 24 h later."""
        assert status.over, status
        said = status, progress.encode(), output_file, error_file, errors
        return self._call("batch_end", text, batch, epoch, owner, *said)

    def cancel(self, batch: str) -> Call[str]:
        """Ask for a batch to be cancelled: its status now, or gone. One that is over stays as it is."""
        return self._call("batch_cancel", text, batch)

    def look(self, batch: str) -> Call[BatchState | None]:
        """All that stands of a batch. None when Redis does not know it."""
        return self._call("batch_look", _state, batch)

    def stale(self, after_ms: int, limit: int) -> Call[tuple[str, ...]]:
        """Batches that nobody has run for `after_ms`, or taken up in the first place; first those that somebody ran."""
        return self._call("batch_stale", lambda raw: tuple(map(text, raw)), after_ms, limit)
