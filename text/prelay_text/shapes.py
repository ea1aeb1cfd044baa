"""The JSON Schema of what render.py makes: whole answers, and the chunks of streams. What the OpenAPI page shows."""

from __future__ import annotations

from collections.abc import Mapping

from .checks import Schema

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_IDS: Schema = {"type": "array", "items": _COUNT}
_NULL: Schema = {"type": "null"}
_LOGPROB: Schema = {"type": "number"}
_FINISH: Schema = {"type": "string", "enum": ["stop", "length"]}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, _NULL]}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _object(always: Mapping[str, Schema], sometimes: Mapping[str, Schema] | None = None) -> Schema:
    """An object of these fields and no others."""
    fields = {**always, **(sometimes or {})}
    return {"type": "object", "required": list(always), "properties": fields, "additionalProperties": False}


_USAGE = _object(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
    }
)
_LIKELY: dict[str, Schema] = {
    "token": _TEXT,
    "logprob": _LOGPROB,
    "bytes": _list({"type": "integer", "minimum": 0, "maximum": 255}),
}
_CHAT_LOGPROBS = _object(
    {"content": _list(_object({**_LIKELY, "top_logprobs": _list(_object(_LIKELY))})), "refusal": _NULL}
)
#: The first token of an echoed prompt has no log-probability: nothing comes before it.
_COMPLETION_LOGPROBS = _object(
    {
        "tokens": _list(_TEXT),
        "token_logprobs": _list(_or_null(_LOGPROB)),
        "top_logprobs": _list(_or_null({"type": "object", "additionalProperties": _LOGPROB})),
        "text_offset": _list(_COUNT),
    }
)
_RANKED = _object({"logprob": _LOGPROB, "rank": {"type": "integer", "minimum": 1}, "decoded_token": _TEXT})
#: What is told of a prompt to whoever asks for it.
_OF_PROMPT: dict[str, Schema] = {
    "prompt_token_ids": _IDS,
    "prompt_logprobs": _list(_or_null({"type": "object", "additionalProperties": _RANKED})),
}
_MESSAGE = _object({"role": {"const": "assistant"}, "content": _TEXT, "refusal": _NULL})
_DELTA = _object({}, {"role": {"const": "assistant"}, "content": _TEXT})


def _body(kind: str, choice: Schema, always: Mapping[str, Schema], sometimes: Mapping[str, Schema]) -> Schema:
    head: dict[str, Schema] = {"id": _TEXT, "object": {"const": kind}, "created": _COUNT, "model": _TEXT}
    return _object({**head, "system_fingerprint": _TEXT, "choices": _list(choice), **always}, sometimes)


def _choice(words: Mapping[str, Schema], logprobs: Schema, finish: Schema, **sometimes: Schema) -> Schema:
    ending = {"logprobs": _or_null(logprobs), "finish_reason": finish}
    return _object({"index": _COUNT, **words, **ending}, {"token_ids": _IDS, **sometimes})


_TIER: dict[str, Schema] = {"service_tier": _TEXT}
_USAGE_TOO: dict[str, Schema] = {"usage": _or_null(_USAGE)}

#: By the names that the OpenAPI page gives them.
SHAPES: dict[str, Schema] = {
    "Completion": _body(
        "text_completion",
        _choice({"text": _TEXT}, _COMPLETION_LOGPROBS, _FINISH, **_OF_PROMPT),
        {"usage": _USAGE},
        {},
    ),
    "CompletionChunk": _body(
        "text_completion",
        _choice({"text": _TEXT}, _COMPLETION_LOGPROBS, _or_null(_FINISH), prompt_token_ids=_IDS),
        {},
        _USAGE_TOO,
    ),
    "ChatCompletion": _body(
        "chat.completion",
        _choice({"message": _MESSAGE}, _CHAT_LOGPROBS, _FINISH),
        {"usage": _USAGE},
        {**_TIER, **_OF_PROMPT},
    ),
    "ChatCompletionChunk": _body(
        "chat.completion.chunk",
        _choice({"delta": _DELTA}, _CHAT_LOGPROBS, _or_null(_FINISH)),
        {},
        {**_TIER, "prompt_token_ids": _IDS, **_USAGE_TOO},
    ),
}
