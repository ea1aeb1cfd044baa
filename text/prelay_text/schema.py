"""The JSON Schema of a request's body, read from the one table of parameters: what the OpenAPI page shows."""

from __future__ import annotations

from collections.abc import Iterable

from .checks import Schema
from .parameters import Parameter, Route, parameters_of

_TEXT: Schema = {"type": "string"}
_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PART: Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": _TEXT},
}
_MESSAGE: Schema = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant"]},
        "content": {"anyOf": [_TEXT, {"type": "array", "items": _PART, "minItems": 1}]},
        "name": {"anyOf": [{"type": "string", "minLength": 1, "maxLength": 64}, {"type": "null"}]},
    },
}
_OPTION: Schema = {"type": ["boolean", "null"]}

#: The parameters with an inner structure, by name: their checks are functions of their own (messages.py).
STRUCTURED: dict[str, Schema] = {
    "prompt": {
        "anyOf": [
            _TEXT,
            _IDS,
            {"type": "array", "items": {"anyOf": [_TEXT, _IDS]}, "minItems": 1},
        ]
    },
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
    "stream_options": {
        "type": "object",
        "properties": {"include_usage": _OPTION, "continuous_usage_stats": _OPTION},
    },
    "chat_template_kwargs": {"type": "object"},
}


def schema_of(row: Parameter) -> Schema:
    """What the parameter takes; an optional one may be null, which means its default. Empty where nobody has said."""
    found: Schema = STRUCTURED.get(row.name) or getattr(row.check, "schema", {})
    if row.required or not found:
        return found
    found = {"anyOf": [found, {"type": "null"}]}
    return found | {"default": row.default} if isinstance(row.default, bool | int | float | str) else found


def body_schema(rows: Iterable[Parameter], *, required: Iterable[str] = ()) -> Schema:
    """An object of the implemented parameters among `rows`. Refused ones are left out: they are accepted as neutral
    values only.
    """
    rows = [row for row in rows if row.check is not None]
    return {
        "type": "object",
        "required": [*required, *(row.name for row in rows if row.required)],
        "properties": {row.name: schema_of(row) for row in rows},
        "additionalProperties": False,
    }


def request_schema(route: Route) -> Schema:
    """The body of a completion or a chat."""
    return body_schema(parameters_of(route).values())
