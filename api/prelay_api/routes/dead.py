"""Dead letters: jobs that were given up because each of their last attempts took a worker with it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..dead import drop_letter, list_letters, retry_letter
from ..query import OF_LETTERS, documented, wanted_letters
from ..replies import json_reply
from ..service import service_of

router = APIRouter(tags=["Admin"])

_NOT_FOUND: dict[int | str, dict[str, Any]] = {404: {"description": "No such dead letter."}}


@router.get("/admin/dead", summary="List the dead letters", openapi_extra=documented(OF_LETTERS))
async def dead(request: Request) -> Response:
    """The newest first; `count` counts all. `retry` says whether the job is still there to be tried again."""
    letters, count = await list_letters(service_of(request).queue, wanted_letters(request.query_params))
    found = [
        {"id": each.entry, "ms": each.ms, "job": each.job, "why": each.why, "retry": bool(each.spec and each.form)}
        for each in letters
    ]
    return json_reply({"dead": found, "count": count})


@router.post(
    "/admin/dead/{letter_id}/retry",
    summary="Try a dead letter again",
    status_code=202,
    responses={**_NOT_FOUND, 409: {"description": "Its job was not kept."}},
)
async def retry(request: Request, letter_id: str) -> Response:
    """Submit the job anew, as a request with the answered `request`: GET /v1/streams/{request} reads its answer."""
    request_id = await retry_letter(service_of(request).queue, letter_id)
    return json_reply({"id": letter_id, "request": request_id}, 202)


@router.delete("/admin/dead/{letter_id}", summary="Drop a dead letter", responses=_NOT_FOUND)
async def drop(request: Request, letter_id: str) -> Response:
    """Forget it."""
    await drop_letter(service_of(request).queue, letter_id)
    return json_reply({"id": letter_id, "dropped": True})
