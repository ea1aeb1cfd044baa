"""/v1/batches: a file of requests that is answered when there is room."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from prelay_files.ids import is_batch_id
from prelay_files.record import BatchRecord
from prelay_queue.batches import BatchState, BatchStatus
from prelay_queue.errors import SentBefore

from ..batch_object import batch_object, page_of
from ..batch_order import batch_order, order_schema
from ..body import read_json
from ..idempotency import another_body, resent
from ..outcome import CLOSING, Failure
from ..page_query import read_query, that_is, whole
from ..replies import failed, json_reply
from ..service import Service, service_of
from .files import ID, answers, list_of, parameter

router = APIRouter(tags=["Batches"])

#: OpenAI's limit of one page, and what it has when nobody says.
MAX_PAGE, PAGE = 100, 20

_MOMENT = {"type": ["integer", "null"]}
_MOMENTS = (
    "in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at",
)  # fmt: skip
_COUNTS = {name: {"type": "integer"} for name in ("total", "completed", "failed")}
_TOKENS = {name: {"type": "integer"} for name in ("input_tokens", "output_tokens", "total_tokens")}
_BATCH = {
    "type": "object",
    "required": ["id", "object", "endpoint", "input_file_id", "completion_window", "status", "created_at"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "batch"},
        "endpoint": {"type": "string"},
        "model": {"type": ["string", "null"]},
        "errors": {"type": ["object", "null"], "description": "Why it failed as a whole."},
        "input_file_id": {"type": "string"},
        "completion_window": {"type": "string"},
        "status": {"enum": [str(status) for status in BatchStatus]},
        "output_file_id": ID,
        "error_file_id": ID,
        "created_at": {"type": "integer"},
        "expires_at": {"type": "integer"},
        **dict.fromkeys(_MOMENTS, _MOMENT),
        "request_counts": {"type": "object", "properties": _COUNTS},
        "usage": {"anyOf": [{"type": "object", "properties": _TOKENS}, {"type": "null"}]},
        "metadata": {"type": ["object", "null"], "additionalProperties": {"type": "string"}},
    },
    "additionalProperties": False,
}
_NO_BATCH: dict[int | str, dict[str, Any]] = {404: {"description": "There is no such batch."}}
_QUERY = {
    "after": (that_is("the id of a batch", is_batch_id), ""),
    "limit": (whole(1, MAX_PAGE), PAGE),
}
_EXAMPLE = {
    "input_file_id": f"file-{0:024x}",
    "endpoint": "/v1/chat/completions",
    "completion_window": "24h",
    "metadata": {"of": "me"},
}


@router.post(
    "/v1/batches",
    summary="Run a file of requests",
    responses={
        **answers(_BATCH),
        409: {"description": "It is being sent at this moment, under the same key."},
        422: {"description": "The Idempotency-Key was sent before with another body."},
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": order_schema(), "example": _EXAMPLE}},
        }
    },
)
async def create(request: Request) -> Response:
    """Its lines run in the class `batch`, which gives way to all others, and are kept through any crash.

    What is not done when the `completion_window` ends is in the error file as `batch_expired`. 503: it was not taken,
    and will not run. Sent again under the same Idempotency-Key, or by an official client by itself, it is the same
    batch.
    """
    service = service_of(request)
    if service.closing:
        return failed(CLOSING)
    batches = service.batches
    body, _ = await read_json(request, service.config.max_body_bytes)
    order = batch_order(body)
    service.memory.check()
    try:
        record, state = await batches.create_once(order, resent(request, body))
    except SentBefore as before:
        return failed(another_body(f"batch {before.request_id}"))
    return json_reply(_shown(service, record, state))


@router.get(
    "/v1/batches",
    summary="List the batches",
    responses=answers(list_of(_BATCH)),
    openapi_extra={
        "parameters": [
            parameter("after", {"type": "string", "pattern": "^batch_[0-9a-f]{24}$"}),
            parameter("limit", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}),
        ]
    },
)
async def list_batches(request: Request) -> Response:
    """Page by page, the newest first: `after` is the last id of the page before."""
    service = service_of(request)
    batches = service.batches
    query = read_query(request, _QUERY)
    found = await batches.list(query["after"], query["limit"] + 1)
    return json_reply(page_of([_shown(service, *each) for each in found], query["limit"]))


@router.get("/v1/batches/{batch_id}", summary="Look a batch up", responses={**answers(_BATCH), **_NO_BATCH})
async def batch_by_id(request: Request, batch_id: str) -> Response:
    """How far it is. Its files have ids when it is over."""
    service = service_of(request)
    return json_reply(_shown(service, *await service.batches.find(batch_id)))


@router.post(
    "/v1/batches/{batch_id}/cancel",
    summary="Cancel a batch",
    responses={**answers(_BATCH), **_NO_BATCH, 409: {"description": "It is over already."}},
)
async def cancel(request: Request, batch_id: str) -> Response:
    """It becomes `cancelling`, and `cancelled` once its files are there.

    What was done stays, what was not is in the error file as `batch_cancelled`. May be asked again.
    """
    service = service_of(request)
    record, state = await service.batches.cancel(batch_id)
    if state is not None and state.status.over and state.status is not BatchStatus.CANCELLED:
        message = f"batch {batch_id} is {state.status}: it cannot be cancelled any more"
        return failed(Failure(409, message, "invalid_request_error", "batch_over", "batch_id"))
    return json_reply(_shown(service, record, state))


def _shown(service: Service, record: BatchRecord, state: BatchState | None) -> dict[str, Any]:
    return batch_object(record, state, service.config.served_model_name if service.batches.is_mine(record) else None)
