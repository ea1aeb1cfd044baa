"""A stream that goes on for a client that lost it, whichever process began it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from redis.exceptions import RedisError

from prelay_queue.client import AsyncQueue, translate
from prelay_queue.events import LogView
from prelay_queue.job import JobSpec
from prelay_queue.log import read_logs
from prelay_queue.scripts import Attached, NewJob
from prelay_queue.state import State
from prelay_text.errors import RequestError
from prelay_text.form import Form

from .outcome import Failure
from .request_id import was_given
from .session import Links, Session

#: The cursor of a choice of which the client has nothing.
START = "0-0"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a client stands in one choice: it has the first `count` tokens, and perhaps the end."""

    count: int = 0
    told_end: bool = False


def unknown(request_id: str) -> Failure:
    """No process knows the stream: it is gone, 410, or it never was, 404."""
    if was_given(request_id):
        message = (
            f"the stream {request_id} is not kept any longer: an answer is kept for 300 s after its end, or 24 h under"
            " an Idempotency-Key"
        )
        return Failure(410, message, "invalid_request_error", "stream_expired", "request_id")
    message = f"there is no stream {request_id[:100]!r}, and never was"
    return Failure(404, message, "invalid_request_error", "stream_not_found", "request_id")


@dataclass(frozen=True, slots=True)
class Cursor:
    """The place that a client names, and in which parameter it does."""

    text: str
    param: str = "Last-Event-ID"


def diverged(request_id: str, cursor: Cursor) -> Failure:
    """The client has what the log has not: going on would contradict it."""
    place = f"{cursor.param} {cursor.text[:100]!r}"
    message = f"the place {place} is not in the stream {request_id[:100]!r}: it cannot go on from there"
    return Failure(409, message, "invalid_request_error", "diverged", cursor.param)


def places_of(cursor: Cursor, views: Sequence[LogView]) -> list[Place] | None:
    """Where the client stands in each choice; None when the logs do not have that place.

    Raise RequestError when it is no cursor of a stream with so many choices.
    """
    parts = cursor.text.split(",")
    if len(parts) != len(views):
        message = f"{cursor.param} has {len(parts)} places, but the stream has {len(views)} choices"
        raise RequestError(message, param=cursor.param, code="invalid_value")
    found = [_place(cursor.param, part, view) for part, view in zip(parts, views, strict=True)]
    whole = [place for place in found if place is not None]
    return whole if len(whole) == len(found) else None


def _place(param: str, part: str, view: LogView) -> Place | None:
    epoch_text, _, seq_text = part.partition("-")
    if not (_is_number(epoch_text) and _is_number(seq_text)):
        message = f"{param} must be the id of a frame, like 1-17 or 1-17,1-15, not {part[:100]!r}"
        raise RequestError(message, param=param, code="invalid_value")
    epoch, seq = int(epoch_text), int(seq_text)
    if part == START:
        return Place()
    if seq < len(view.ids):
        return Place(seq + 1) if view.epochs[seq] == epoch else None
    over = view.state == State.DONE and (epoch, seq) == (view.epoch, len(view.ids))
    return Place(seq, told_end=True) if over else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 16


async def resume(links: Links, request_id: str, cursor: Cursor | None) -> Session | Failure:
    """A session that goes on at `cursor`, or from the start. Always `close` it.

    Watches every choice first and looks then, so that no job ends for want of a viewer in between. Raise RequestError
    for what is no cursor, QueueUnavailable, QueueError.
    """
    attachment = links.attachment()
    found = await _attach(links, request_id, attachment)
    if found is None:
        return unknown(request_id)
    outcome: Session | Failure | None = None
    try:
        outcome = await _go_on(links, request_id, cursor, [_work(each, attachment) for each in found], attachment)
        return outcome
    finally:
        if not isinstance(outcome, Session):
            _detach(links, request_id, attachment, len(found))


async def _go_on(
    links: Links,
    request_id: str,
    cursor: Cursor | None,
    work: Sequence[tuple[Form, NewJob | None]],
    attachment: str,
) -> Session | Failure:
    """The session of jobs that we watch already, begun at the cursor."""
    found = await read_logs(links.hub.queue, [form.job for form, _ in work])
    views = [view for view in found if view is not None]
    if len(views) < len(work):
        return unknown(request_id)
    places = [Place()] * len(views)
    if cursor is not None:
        found_places = places_of(cursor, views)
        if found_places is None:
            return diverged(request_id, cursor)
        places = found_places
    session = Session(links, work, attachment, attached=True)
    session.begun = cursor is not None
    for choice, view, place in zip(session.choices, views, places, strict=True):
        choice.resume(view, place.count, told_end=place.told_end)
    session.start()
    return session


async def _attach(links: Links, request_id: str, attachment: str) -> list[Attached] | None:
    """Watch all choices of a request; None when one is unknown, or is nobody's to watch."""
    queue, choices, whole = links.hub.queue, 1, False
    if not await _is_shown(queue, f"{request_id}/0"):
        return None
    try:
        first = await queue.run(queue.scripts.attach(f"{request_id}/0", attachment))
        if first is None:
            return None
        choices = first.choices
        ids = [f"{request_id}/{index}" for index in range(1, choices)]
        others = await queue.run_many([queue.scripts.attach(each, attachment) for each in ids])
        found = [first, *(each for each in others if each is not None)]
        whole = len(found) == choices and all(each.form for each in found)
        return found if whole else None
    finally:
        if not whole:  # a call whose answer was lost may have attached us all the same
            _detach(links, request_id, attachment, choices)


async def _is_shown(queue: AsyncQueue, job: str) -> bool:
    """Whether the job is there and has a form. To watch one that has none (a batch's) and to leave would end it."""
    try:
        return bool(await queue.redis.hstrlen(queue.keys.job(job), "vw"))
    except RedisError as error:
        raise translate(error) from None


def _work(attached: Attached, attachment: str) -> tuple[Form, NewJob | None]:
    """How a job is shown, and what to submit again should Redis lose it."""
    form = Form.decode(attached.form)
    if not attached.spec:
        return form, None
    spec = JobSpec.decode(attached.spec)
    ends_at = time.monotonic() + attached.ttl_ms / 1000 if attached.ttl_ms else 0.0
    return form, NewJob(spec, attachment, attached.choices, ends_at, form=attached.form)


def _detach(links: Links, request_id: str, attachment: str, choices: int) -> None:
    for index in range(choices):
        links.canceller.put(f"{request_id}/{index}", attachment)
