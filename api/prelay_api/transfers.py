"""Uploads and downloads that are under way: long, and ended in order when the process stops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from .errors import Closing


class Transfers:
    """The tasks of those that are under way."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()
        self._closing = False

    def __len__(self) -> int:
        return len(self._tasks)

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Around a transfer, in its own task. Raise Closing within it when `end` comes, or has come."""
        task = asyncio.current_task()
        assert task is not None
        self._check()
        self._tasks.add(task)
        cancelled_before = task.cancelling()
        try:
            yield
        except asyncio.CancelledError:
            if self._closing and task.uncancel() <= cancelled_before:
                raise Closing from None
            raise
        finally:
            self._tasks.discard(task)

    def _check(self) -> None:
        if self._closing:
            raise Closing

    def end(self) -> None:
        """End all, and let none begin. May be called more than once."""
        if not self._closing:
            self._closing = True
            for task in self._tasks:
                task.cancel()
