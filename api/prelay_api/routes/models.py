"""GET /v1/models: the one model that this fleet serves, and what a request to it may ask for."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from prelay_text.errors import RequestError
from prelay_text.parameters import MAX_LOGPROBS, MAX_STOPS
from prelay_text.request import MAX_CHOICES

from ..replies import json_reply
from ..service import Service, service_of

router = APIRouter(tags=["OpenAI"])

_NUMBER = {"type": "integer"}
_LIMITS = ("context_tokens", "pool_tokens", "vocabulary", "choices", "stop_strings", "logprobs", "body_bytes")
_MODEL = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by", "max_model_len", "limits"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": _NUMBER,
        "owned_by": {"type": "string"},
        "max_model_len": _NUMBER,
        "limits": {
            "type": "object",
            "required": list(_LIMITS),
            "properties": {**dict.fromkeys(_LIMITS, _NUMBER), "pool_tokens": {"type": ["integer", "null"]}},
        },
    },
}
_LIST = {
    "type": "object",
    "required": ["object", "data"],
    "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": _MODEL}},
}


def _answer(schema: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    return {200: {"description": "Found.", "content": {"application/json": {"schema": schema}}}}


def refuse_other_model(service: Service, name: str) -> None:
    """Raise RequestError, 404, when it is not the model that is served."""
    served = service.config.served_model_name
    if name != served:
        message = f"model {name[:100]!r} is not served here; this server has {served!r}"
        raise RequestError(message, param="model", code="model_not_found", status=404)


def _model(service: Service) -> dict[str, Any]:
    limits = service.fleet.seen.limits(service.tokenizer.context_len)
    return {
        "id": service.config.served_model_name,
        "object": "model",
        "created": service.model_created,
        "owned_by": "prelay",
        "max_model_len": limits.tokens,
        "limits": {
            "context_tokens": limits.context_len,
            "pool_tokens": limits.pool_tokens,
            "vocabulary": service.tokenizer.vocab_size,
            "choices": MAX_CHOICES,
            "stop_strings": MAX_STOPS,
            "logprobs": MAX_LOGPROBS,
            "body_bytes": service.config.max_body_bytes,
        },
    }


@router.get("/v1/models", summary="List the models", responses=_answer(_LIST))
async def models(request: Request) -> Response:
    """The list has one entry. `max_model_len` is what prompt and answer may take together, in tokens.

    It is the smaller of `limits.context_tokens`, what the model can read, and `limits.pool_tokens`, what the workers'
    memory holds; null: no worker has told yet. Token ids are below `limits.vocabulary`.
    """
    return json_reply({"object": "list", "data": [_model(service_of(request))]})


@router.get(
    "/v1/models/{model:path}",
    summary="Look a model up",
    responses={**_answer(_MODEL), 404: {"description": "Not served here."}},
)
async def model_by_id(request: Request, model: str) -> Response:
    """The same entry, by its id."""
    service = service_of(request)
    refuse_other_model(service, model)
    return json_reply(_model(service))
