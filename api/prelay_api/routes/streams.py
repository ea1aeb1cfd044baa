"""GET and DELETE /v1/streams/{id}: go on with a stream, or end it."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from redis.exceptions import RedisError
from starlette.responses import Response

from prelay_queue.client import translate

from ..outcome import CLOSING, Failure
from ..replies import failed, json_reply
from ..resume import unknown
from ..service import service_of
from ..sse import EventStream, lingers

router = APIRouter(tags=["Streams"])

_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The rest of the stream, as server-sent events.", "content": {"text/event-stream": {}}},
    404: {"description": "No such stream, or its answer is not kept any longer."},
    409: {"description": "`diverged`: what the client has is not in the stream (the server lost data)."},
}


@router.get("/v1/streams/{request_id}", summary="Go on with a stream", responses=_ANSWERS)
async def go_on(request: Request, request_id: str) -> Response:
    """Continue a stream after the frame whose `id:` is sent as Last-Event-ID (or `?from=`), by default from its start.

    Works on any API process, also after the one that began the stream has died, and until five minutes after the end.
    Never starts anything anew.
    """
    service = service_of(request)
    if service.closing:
        return failed(CLOSING)
    cursor = request.headers.get("last-event-id") or request.query_params.get("from") or None
    session = await service.resume(request_id, cursor)
    if isinstance(session, Failure):
        return failed(session)
    session.linger_s = lingers(request, service.config)
    return EventStream(session, service.config)


@router.delete("/v1/streams/{request_id}", summary="End a stream", responses={404: _ANSWERS[404]})
async def end(request: Request, request_id: str) -> Response:
    """Cancel all choices of a request, whoever watches them. `cancelled` is false for one that was over already."""
    queue = service_of(request).queue
    try:
        count = await queue.redis.hget(queue.keys.job(f"{request_id}/0"), "n")
    except RedisError as error:
        raise translate(error) from None
    if count is None:
        return failed(unknown(request_id))
    # Together: whoever reads the stream cancels the others too as soon as one has ended.
    ends = (queue.run(queue.scripts.cancel(f"{request_id}/{index}", "")) for index in range(int(count)))
    answers = await asyncio.gather(*ends)
    told = [{"index": index, "cancelled": answer == "ended"} for index, answer in enumerate(answers)]
    return json_reply({"id": request_id, "object": "stream.cancelled", "choices": told})
