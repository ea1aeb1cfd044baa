"""The OpenAPI page: FastAPI's own, with what only this server knows put in.

FastAPI describes routes from their signatures, and ours read bodies by themselves, through the table of parameters:
the schemas come from there. Here the shapes of answers, the errors, which all routes share, the served model and the
key are added.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from fastapi import FastAPI

from prelay_text.shapes import SHAPES

from .access import OPEN_PATHS
from .config import ApiConfig

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "description": "Names the parameter, its limit and its value."},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The parameter that is wrong."},
                "code": {"type": ["string", "null"]},
            },
            "additionalProperties": False,
        }
    },
}
_REFERENCE = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
_ALWAYS = {
    "4XX": {"description": "The request is refused: OpenAI's error object says why.", "content": _REFERENCE},
    "5XX": {"description": "The server, its queue or its workers cannot serve now.", "content": _REFERENCE},
}


def describe(app: FastAPI, config: ApiConfig) -> None:
    """Make the app describe itself so. Built when it is first asked for."""
    plain: Callable[[], dict[str, Any]] = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _complete(copy.deepcopy(plain()), config)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way


def _complete(schema: dict[str, Any], config: ApiConfig) -> dict[str, Any]:
    parts = schema.setdefault("components", {})
    parts["schemas"] = {"Error": _ERROR, **SHAPES}  # FastAPI's own are of the 422 that is never answered here
    if config.api_keys:
        parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operation in _operations(schema):
        responses = operation["responses"]
        responses.pop("422", None)
        if path not in OPEN_PATHS:  # a verdict on health is no error, whatever its status
            for status, response in responses.items():
                if status[0] in "45":
                    response["content"] = _REFERENCE
            responses |= _ALWAYS
        if config.api_keys and path not in OPEN_PATHS:
            operation["security"] = [{"key": []}]
        _name_model(operation, config.served_model_name)
    return schema


def _operations(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            yield path, operation


def _name_model(operation: dict[str, Any], name: str) -> None:
    """The one model there is, in the place of any name."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    for shape in content.get("schema", {}).get("anyOf", [content.get("schema", {})]):
        if "model" in shape.get("properties", {}):
            shape["properties"]["model"] = {"type": "string", "enum": [name]}
    if "model" in content.get("example", {}):
        content["example"]["model"] = name
