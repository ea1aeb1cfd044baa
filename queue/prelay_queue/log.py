"""Reading a job back: its log and state in one atomic look. Raises QueueError."""

from __future__ import annotations

from collections.abc import Sequence

from .client import AsyncQueue, SyncQueue
from .events import LogView

#: Logs read in one round trip: one may have some thousand tokens.
_AT_ONCE = 32


async def read_log(queue: AsyncQueue, job: str) -> LogView | None:
    """Return the job's log and state, or None when Redis does not know the job."""
    return await queue.run(queue.scripts.view(job))


async def read_logs(queue: AsyncQueue, jobs: Sequence[str]) -> list[LogView | None]:
    """The same for several jobs, each by itself, in few round trips."""
    found: list[LogView | None] = []
    for start in range(0, len(jobs), _AT_ONCE):
        found += await queue.run_many([queue.scripts.view(job) for job in jobs[start : start + _AT_ONCE]])
    return found


def read_log_sync(queue: SyncQueue, job: str) -> LogView | None:
    """The same for threads."""
    return queue.run(queue.scripts.view(job))
