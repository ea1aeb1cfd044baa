"""Dead letters: jobs that were given up for their crashes. They can be looked at, tried again and dropped."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from redis.exceptions import RedisError

from prelay_queue.client import AsyncQueue, translate
from prelay_queue.history import DeadLetter, read_letters
from prelay_queue.job import JobSpec
from prelay_queue.scripts import NewJob
from prelay_text.errors import RequestError
from prelay_text.form import Form

#: A dead letter's id is that of its entry in the stream `dead`.
_ENTRY = re.compile(r"[0-9]{1,19}-[0-9]{1,19}")


def unknown_letter(entry: str) -> RequestError:
    message = f"no dead letter {entry[:100]!r}: it never was, or it was tried again or dropped"
    return RequestError(message, param="letter_id", code="dead_letter_not_found", status=404)


async def list_letters(queue: AsyncQueue, limit: int) -> tuple[list[DeadLetter], int]:
    """The newest dead letters, and how many there are. Raise QueueError."""
    try:
        async with queue.redis.pipeline(transaction=False) as pipe:
            pipe.xrevrange(queue.keys.dead, count=limit)
            pipe.xlen(queue.keys.dead)
            entries, count = await pipe.execute()
    except RedisError as error:
        raise translate(error) from None
    return read_letters(entries), int(count)


async def read_letter(queue: AsyncQueue, entry: str) -> DeadLetter:
    """Raise RequestError, 404, for one that is not there; QueueError."""
    found: Sequence[DeadLetter] = ()
    if _ENTRY.fullmatch(entry):
        try:
            entries: Any = await queue.redis.xrange(queue.keys.dead, entry, entry)
            found = read_letters(entries)
        except RedisError as error:
            raise translate(error) from None
    if not found:
        raise unknown_letter(entry)
    return found[0]


async def drop_letter(queue: AsyncQueue, entry: str) -> None:
    """Raise RequestError, 404, for one that is not there; QueueError."""
    letter = await read_letter(queue, entry)
    try:
        await queue.redis.xdel(queue.keys.dead, letter.entry)
    except RedisError as error:
        raise translate(error) from None


async def retry_letter(queue: AsyncQueue, entry: str) -> str:
    """Submit the job anew, as a request of its own, and drop the letter. Return the request's id.

    Asked twice at once, it is still one request. Raise RequestError where that cannot be: 404 for a letter that is not
    there, 409 for one without its job. QueueBusy and QueueFull as for any request.
    """
    letter = await read_letter(queue, entry)
    job = _job_again(letter)
    await queue.run(queue.scripts.submit([job]))
    await drop_quietly(queue, entry)
    return job.spec.id.rpartition("/")[0]


async def drop_quietly(queue: AsyncQueue, entry: str) -> None:
    """Drop a letter that may be gone already."""
    try:
        await queue.redis.xdel(queue.keys.dead, entry)
    except RedisError as error:
        raise translate(error) from None


def _job_again(letter: DeadLetter) -> NewJob:
    """The job under a name that follows from the letter's. Its answer is one choice, whatever it was part of."""
    if not letter.form:
        raise _cannot(letter, "it is of a batch, which tries its lines again by itself")
    if not letter.spec:
        raise _cannot(letter, "its prompt was too long to be kept")
    form, spec = Form.decode(letter.form), JobSpec.decode(letter.spec)
    request_id = f"{form.renderer.id}-retry-{letter.entry}"
    renderer = replace(form.renderer, id=request_id, created=int(time.time()))
    shown = replace(form, renderer=renderer, index=0, n=1, candidates=1)
    return NewJob(replace(spec, id=f"{request_id}/0"), form=shown.encode())


def _cannot(letter: DeadLetter, why: str) -> RequestError:
    message = f"the dead letter {letter.entry} cannot be tried again: {why}"
    return RequestError(message, param="letter_id", code="dead_letter_without_job", status=409)
