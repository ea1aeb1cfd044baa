"""GET, HEAD and DELETE /v1/streams/{id}: go on with a stream, ask whether there is one, or end it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from redis.exceptions import RedisError
from starlette.responses import Response

from prelay_queue.client import AsyncQueue, translate
from prelay_queue.errors import QueueUnavailable

from ..outcome import CLOSING, UNAVAILABLE, Failure
from ..replies import failed, json_reply
from ..resume import Cursor, unknown
from ..service import service_of
from ..sse import EventStream, lingers

#: So long is waited for Redis to find or end a stream, seconds; a client that cancels does not wait for retries.
ANSWER_S = 3.0

PREFIX = "/v1/streams/"

_T = TypeVar("_T")

router = APIRouter(tags=["Streams"])

_SILENT = f"the queue (Redis) did not answer in {ANSWER_S:g} s"
_UNKNOWN_END = replace(UNAVAILABLE, message=f"{_SILENT}; perhaps the stream ends, perhaps not: try again")
_NOT_SEEN = replace(UNAVAILABLE, message=f"{_SILENT}: try again")

_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The rest of the stream, as server-sent events.", "content": {"text/event-stream": {}}},
    404: {"description": "There never was such a stream."},
    410: {"description": "Its answer is not kept any longer, or the stream was cancelled before it was complete."},
    409: {"description": "`diverged`: what the client has is not in the stream (the server lost data)."},
}


_CANCELLED = {
    "type": "object",
    "required": ["id", "object", "choices"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "stream.cancelled"},
        "choices": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["index", "cancelled"],
                "properties": {"index": {"type": "integer"}, "cancelled": {"type": "boolean"}},
            },
        },
    },
}
_ENDED: dict[int | str, dict[str, Any]] = {
    200: {"description": "Ended.", "content": {"application/json": {"schema": _CANCELLED}}},
    404: _ANSWERS[404],
    410: {"description": "Its answer is not kept any longer."},
}


def _cursor(request: Request) -> Cursor | None:
    """Where the client stands: as the header says, or else the query; nothing is said by an empty one."""
    for name, found in (("Last-Event-ID", request.headers), ("from", request.query_params)):
        if text := found.get(name):
            return Cursor(text, name)
    return None


@router.get(PREFIX + "{request_id}", summary="Go on with a stream", responses=_ANSWERS, response_class=Response)
async def go_on(request: Request, request_id: str) -> Response:
    """Continue a stream after the frame whose `id:` is sent as Last-Event-ID (or `?from=`), by default from its start.

    Works on any API process, also after the one that began the stream has died, and until five minutes after the end.
    Never starts anything anew.
    """
    service = service_of(request)
    if service.closing:
        return failed(CLOSING)
    cursor = _cursor(request)
    session = await service.resume(request_id, cursor)
    if isinstance(session, Failure):
        return failed(session)
    session.linger_s = lingers(request, service.config)
    return EventStream(session, service.config)


@router.head(PREFIX + "{request_id}", include_in_schema=False)
async def look(request: Request, request_id: str) -> Response:
    """Say whether there is such a stream, without watching it."""
    found = await _answered(_choices(service_of(request).queue, request_id), request_id, _NOT_SEEN)
    return failed(found) if isinstance(found, Failure) else Response(media_type=EventStream.media_type)


@router.delete(PREFIX + "{request_id}", summary="End a stream", responses=_ENDED)
async def end(request: Request, request_id: str) -> Response:
    """Cancel all choices of a request, whoever watches them. `cancelled` is false for one that was over already."""
    answers = await _answered(_cancel_all(service_of(request).queue, request_id), request_id, _UNKNOWN_END)
    if isinstance(answers, Failure):
        return failed(answers)
    told = [{"index": index, "cancelled": answer == "ended"} for index, answer in enumerate(answers)]
    return json_reply({"id": request_id, "object": "stream.cancelled", "choices": told})


async def _answered(asked: Awaitable[_T | None], request_id: str, silent: Failure) -> _T | Failure:
    """What the queue says of a request, `silent` where it says nothing in time."""
    try:
        async with asyncio.timeout(ANSWER_S):
            found = await asked
    except (QueueUnavailable, TimeoutError):
        return silent
    return unknown(request_id) if found is None else found


async def _cancel_all(queue: AsyncQueue, request_id: str) -> list[str] | None:
    """What became of each choice; None for a request that is not known. Raise QueueError."""
    count = await _choices(queue, request_id)
    if count is None:
        return None
    # Together: whoever reads the stream cancels the others too as soon as one has ended.
    return await queue.run_many([queue.scripts.cancel(f"{request_id}/{index}", "") for index in range(count)])


async def _choices(queue: AsyncQueue, request_id: str) -> int | None:
    """How many choices a request has; None for one that is not known. Raise QueueError."""
    try:
        count = await queue.redis.hget(queue.keys.job(f"{request_id}/0"), "n")
    except RedisError as error:
        raise translate(error) from None
    return None if count is None else int(count)
