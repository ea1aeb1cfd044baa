"""Answers in one piece."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response

from .outcome import Failure


def json_reply(body: bytes | dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    return Response(raw, status, headers=dict(headers or {}), media_type="application/json")


def failed(problem: Failure, headers: Mapping[str, str] | None = None) -> Response:
    """An error answer in OpenAI's shape."""
    return json_reply(problem.body, problem.status, {**problem.headers, **(headers or {})})
