"""Reading a job back: its log and state in one atomic look."""

from __future__ import annotations

from typing import Any

from redis.exceptions import RedisError

from .client import AsyncQueue, SyncQueue, translate
from .events import LogView
from .scripts import text

_FIELDS = ("st", "ep", "fin", "err")


def _view(fields: list[Any], entries: list[Any], resume: Any) -> LogView | None:
    if fields[0] is None:
        return None
    state, epoch, reason, error = (text(f) if f is not None else "" for f in fields)
    ids = tuple(int(data[b"t"]) for _, data in entries if b"t" in data)
    return LogView(int(epoch), state, ids, int(resume or 0), reason, error)


async def read_log(queue: AsyncQueue, job: str) -> LogView | None:
    """Return the job's log and state, or None when Redis does not know the job. Raise QueueError."""
    try:
        async with queue.redis.pipeline(transaction=True) as pipe:
            pipe.hmget(queue.keys.job(job), *_FIELDS)
            pipe.xrange(queue.keys.log(job))
            fields, entries = await pipe.execute()
        resume = await queue.redis.hget(queue.keys.job(job), f"rs:{text(fields[1])}") if fields[1] else 0
    except RedisError as error:
        raise translate(error) from None
    return _view(fields, entries, resume)


def read_log_sync(queue: SyncQueue, job: str) -> LogView | None:
    """The same for threads."""
    try:
        with queue.redis.pipeline(transaction=True) as pipe:
            pipe.hmget(queue.keys.job(job), *_FIELDS)
            pipe.xrange(queue.keys.log(job))
            fields, entries = pipe.execute()
        resume = queue.redis.hget(queue.keys.job(job), f"rs:{text(fields[1])}") if fields[1] else 0
    except RedisError as error:
        raise translate(error) from None
    return _view(fields, entries, resume)
