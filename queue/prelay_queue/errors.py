"""Errors of the queue.

QueueError
├── BadMessageError       a stored message does not parse; `raw` keeps the bytes
├── IllegalTransition     an event that the state table does not allow
├── QueueUnavailable      no connection, loading, read-only or timed out: try again
└── QueueFull             the server is over maxmemory: new work is refused, running work drains
"""

from __future__ import annotations


class QueueError(Exception):
    """The queue could not do what was asked."""


class BadMessageError(QueueError):
    """A stored message does not parse."""

    def __init__(self, raw: bytes, why: str) -> None:
        super().__init__(f"cannot read a queue message ({why}): {raw[:200]!r}")
        self.raw = raw


class IllegalTransition(QueueError):  # noqa: N818 - reads as the fact it states
    """An event that the state table does not allow in this state."""


class QueueUnavailable(QueueError):  # noqa: N818
    """Redis does not answer; the call may be repeated."""


class QueueFull(QueueError):  # noqa: N818
    """Redis is over its memory limit and takes no new work."""
