"""POST /tokenize and /detokenize: the tokenizer by itself, as vLLM serves it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from prelay_text.tokenize import (
    TokenizeRequest,
    detokenize_request,
    detokenize_schema,
    tokenize_request,
    tokenize_schema,
)
from prelay_text.tokenizer import Tokenizer

from ..body import understand
from ..replies import json_reply
from ..service import service_of
from .models import refuse_other_model

router = APIRouter(tags=["Tokens"])

T = TypeVar("T")


_INTS = {"type": "array", "items": {"type": "integer"}}
_COUNTED = {
    "count": {"type": "integer"},
    "max_model_len": {"type": "integer"},
    "tokens": _INTS,
    "token_strs": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
}


def _answer(properties: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    schema = {"type": "object", "required": list(properties), "properties": properties, "additionalProperties": False}
    return {200: {"description": "Done.", "content": {"application/json": {"schema": schema}}}}


def _body(schema: dict[str, Any], example: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema, "example": example}}}}


@router.post(
    "/tokenize",
    summary="Count tokens",
    responses=_answer(_COUNTED),
    openapi_extra=_body(tokenize_schema(), {"prompt": "The sea is"}),
)
async def tokenize(request: Request) -> Response:
    """The ids that the model would read for a `prompt` (as a completion has it) or for `messages` (as a chat has them).

    `max_model_len` is what prompt and answer may take together. `return_token_strs` adds the vocabulary's own
    spellings.
    """
    service = service_of(request)
    name = service.config.served_model_name
    wanted, long = await understand(request, service.config.max_body_bytes, lambda body: tokenize_request(body, name))
    refuse_other_model(service, wanted.model)
    limits = await service.fleet.limits(service.tokenizer.context_len)
    found = await _maybe_in_thread(long, lambda: _tokens(wanted, service.tokenizer))
    return json_reply({"max_model_len": limits.tokens, **found})


@router.post(
    "/detokenize",
    summary="Text of tokens",
    responses=_answer({"prompt": {"type": "string"}}),
    openapi_extra=_body(detokenize_schema(), {"tokens": [1, 2, 3]}),
)
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens and all."""
    service = service_of(request)
    name = service.config.served_model_name
    wanted, long = await understand(request, service.config.max_body_bytes, lambda body: detokenize_request(body, name))
    refuse_other_model(service, wanted.model)
    return json_reply({"prompt": await _maybe_in_thread(long, lambda: wanted.text(service.tokenizer))})


async def _maybe_in_thread(long: bool, work: Callable[[], T]) -> T:
    """Long work must not hold up the streams of this process."""
    return await asyncio.to_thread(work) if long else work()


def _tokens(wanted: TokenizeRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    ids = wanted.ids(tokenizer)
    spelled = [tokenizer.token(token) or "" for token in ids] if wanted.strings else None
    return {"count": len(ids), "tokens": ids, "token_strs": spelled}
