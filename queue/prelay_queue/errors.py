"""Errors of the queue.

QueueError
├── BadMessageError       a stored message does not parse; `raw` keeps the bytes
├── IllegalTransition     an event that the state table does not allow
├── QueueUnavailable      no connection, loading, read-only or timed out: try again
├── SentBefore            another request was sent under this key
├── QueueFull             the server is over maxmemory: new work is refused, running work drains
└── QueueBusy             as much waits as may wait: new work of this class is refused for a while
"""

from __future__ import annotations


class QueueError(Exception):
    """The queue could not do what was asked."""


class BadMessageError(QueueError):
    """A stored message does not parse."""

    def __init__(self, raw: bytes, why: str) -> None:
        super().__init__(f"cannot read a queue message of {len(raw)} bytes ({why})")  # not said: it may hold a prompt
        self.raw = raw


class IllegalTransition(QueueError):  # noqa: N818 - reads as the fact it states
    """An event that the state table does not allow in this state."""


class QueueUnavailable(QueueError):  # noqa: N818
    """Redis does not answer; the call may be repeated."""


class QueueFull(QueueError):  # noqa: N818
    """Redis is over its memory limit and takes no new work."""


class QueueBusy(QueueError):  # noqa: N818
    """More jobs, or tokens, of one class would wait than may. `retry_ms`: when there should be room."""

    def __init__(self, cls: str, kind: str, waiting: int, asked: int, limit: int, retry_ms: int) -> None:
        """`kind` is jobs or tokens (of prompts): so many wait, so many were to come, and so many may wait."""
        of = "" if kind == "jobs" else " of prompts"
        super().__init__(
            f"the queue is full for class {cls}: {waiting} {kind}{of} wait, {asked} more were asked for, and at most"
            f" {limit} may wait"
        )
        self.cls, self.kind, self.waiting, self.asked, self.limit = cls, kind, waiting, asked, limit
        self.retry_ms = retry_ms


class SentBefore(QueueError):  # noqa: N818
    """A request was sent before under the same key: `request_id`. `same`: with the same body."""

    def __init__(self, request_id: str, *, same: bool) -> None:
        super().__init__(f"request {request_id} was sent under this key, with {'the same' if same else 'another'} body")
        self.request_id, self.same = request_id, same
