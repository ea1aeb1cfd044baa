"""What a stream says while nothing flows: where its request is."""

from __future__ import annotations

from typing import Any

from redis.exceptions import RedisError

from prelay_queue.errors import QueueError
from prelay_queue.scripts import text
from prelay_queue.state import State

from .session import Session

#: Words for the states in which a job is with a worker.
_WORDS = {
    State.PREFILL: "prefill",
    State.STAGED: "waiting for decode",
    State.ADOPTING: "hand-over",
    State.DECODE: "decode",
    State.PREEMPTED: "preempted",
}

#: When Redis does not say.
SILENT = "keep-alive"


async def phase_of(session: Session) -> str:
    """The phase of the first choice that has not ended; a waiting one has its place in the queue, from 1."""
    choice = next((each for each in session.choices if each.relay.end is None), None)
    if choice is None:
        return SILENT
    queue = session.queue
    try:
        async with queue.redis.pipeline(transaction=False) as pipe:
            pipe.hget(queue.keys.job(choice.id), "st")
            pipe.zrank(queue.keys.queued, choice.id)
            found: list[Any] = await pipe.execute()
    except (RedisError, OSError, QueueError):
        return SILENT
    state, rank = found
    if state is None:
        return SILENT
    if rank is not None:
        return f"queued {int(rank) + 1}"
    return _WORDS.get(State(text(state)), SILENT)
