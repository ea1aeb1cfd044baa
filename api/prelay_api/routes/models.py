"""GET /v1/models: the one model that this fleet serves."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..outcome import Failure
from ..replies import failed, json_reply
from ..service import Service, service_of

router = APIRouter(tags=["OpenAI"])


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.config.served_model_name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "prelay",
        "max_model_len": service.fleet.seen.limits(service.tokenizer.context_len).tokens,
    }


@router.get("/v1/models", summary="List the models")
async def models(request: Request) -> Response:
    """The list has one entry. `max_model_len` is what prompt and answer may take together, in tokens."""
    return json_reply({"object": "list", "data": [_model(service_of(request))]})


@router.get("/v1/models/{model:path}", summary="Look a model up", responses={404: {"description": "Not served here."}})
async def model_by_id(request: Request, model: str) -> Response:
    """The same entry, by its id."""
    service = service_of(request)
    if model != service.config.served_model_name:
        message = f"model {model[:100]!r} is not served here; this server has {service.config.served_model_name!r}"
        return failed(Failure(404, message, "invalid_request_error", "model_not_found", "model"))
    return json_reply(_model(service))
