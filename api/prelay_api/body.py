"""The body of a request: read up to a limit, parsed as JSON."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request

from prelay_text.errors import RequestError

from .errors import BodyTooLarge


async def read_body(request: Request, limit: int) -> bytes:
    """Read the whole body. Raise BodyTooLarge as soon as it is known to exceed `limit` bytes."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise BodyTooLarge(f"the request body has {declared} bytes; at most {limit} are taken")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise BodyTooLarge(f"the request body has more than the {limit} bytes that are taken")
        parts.append(part)
    return b"".join(parts)


def parse_json(raw: bytes) -> Any:
    """Raise RequestError when it is not JSON."""
    if not raw.strip():
        raise RequestError("the request body is empty: send a JSON object", code="invalid_json")
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the request body is not valid JSON: {error}", code="invalid_json") from None
