"""Reading a job back: its log and state in one atomic look. Raises QueueError."""

from __future__ import annotations

from .client import AsyncQueue, SyncQueue
from .events import LogView


async def read_log(queue: AsyncQueue, job: str) -> LogView | None:
    """Return the job's log and state, or None when Redis does not know the job."""
    return await queue.run(queue.scripts.view(job))


def read_log_sync(queue: SyncQueue, job: str) -> LogView | None:
    """The same for threads."""
    return queue.run(queue.scripts.view(job))
