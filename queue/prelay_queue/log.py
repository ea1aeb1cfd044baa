"""Reading a job back: its log and state in one look. Raises QueueError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.exceptions import RedisError

from .client import AsyncQueue, SyncQueue, translate
from .events import LogView
from .scripts import text

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


def read_ended(queue: SyncQueue, jobs: Sequence[str]) -> list[LogView | None]:
    """For each job that is over what stands of it; None for one that runs, or that Redis does not know whole.

    Plain reads, which take a tenth of the server's time that a script takes. They are as good, since a job that is over
    changes no more: whatever expires between two of them is missed as a whole.
    """
    with queue.redis.pipeline(transaction=False) as pipe:
        for job in jobs:
            pipe.hmget(queue.keys.job(job), "st", "ep", "nx", "fin", "err")
            pipe.execute_command("XRANGE", queue.keys.log(job), "-", "+")
        try:
            found: list[Any] = pipe.execute()
        except RedisError as error:
            raise translate(error) from None
    return [_ended(found[at], found[at + 1]) for at in range(0, len(found), 2)]


def _ended(job: Any, entries: Any) -> LogView | None:
    state, epoch, count, reason, error = job
    if state != b"done":
        return None
    tokens = [fields for _, fields in entries if b"t" in fields]
    if len(tokens) != int(count):
        return None
    ids = tuple(int(fields[b"t"]) for fields in tokens)
    noted = any(b"x" in fields for fields in tokens)
    notes = tuple(text(fields.get(b"x", b"")) for fields in tokens) if noted else ()
    return LogView(int(epoch), "done", ids, 0, text(reason), text(error), notes)
