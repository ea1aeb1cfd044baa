"""Is the process alive, and would a request be served?"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from prelay_queue.errors import QueueError

from ..fleet import read_fleet
from ..replies import json_reply
from ..service import Service, service_of

router = APIRouter(tags=["Health"])

#: A queue that has not answered by then counts as away, seconds.
ANSWER_WITHIN_S = 0.8


@router.get("/health/live", summary="Alive")
async def live() -> Response:
    """200 as long as the process answers at all."""
    return json_reply({"status": "alive"})


@router.get("/health/ready", summary="Ready", responses={503: {"description": "Not ready; `reasons` says why."}})
async def ready(request: Request) -> Response:
    """200 when workers that make progress could serve a request now.

    Judged by the workers' own model loops: a worker that hangs fails it within 4 seconds.
    """
    reasons = await _reasons(service_of(request))
    verdict = {"status": "not ready", "reasons": reasons} if reasons else {"status": "ready", "reasons": []}
    return json_reply(verdict, 503 if reasons else 200, {"retry-after": "2"} if reasons else None)


@router.get("/health", summary="Ready, under its short name", responses={503: {"description": "Not ready."}})
async def health(request: Request) -> Response:
    """The verdict of /health/ready."""
    return await ready(request)


async def _reasons(service: Service) -> list[str]:
    if service.closing:
        return ["shutting down"]
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            return (await read_fleet(service.queue)).problems()
    except (TimeoutError, QueueError):
        return ["the queue (Redis) does not answer"]
