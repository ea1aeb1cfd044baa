"""A request that its client may send again: the header Idempotency-Key, and what is kept of it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request

from prelay_text.errors import RequestError

from .outcome import Failure

HEADER = "idempotency-key"
#: Characters of a key.
MAX_CHARS = 255
#: Arrays and objects inside each other in a body that comes under a key: as many as orjson writes.
MAX_DEPTH = 254


@dataclass(frozen=True, slots=True)
class Sent:
    """What stands in the queue of a key and of the body sent under it: digests, so that neither can be read there."""

    key: str
    digest: str


def sent_under(request: Request, body: Any) -> Sent | None:
    """The request's key, if it has one. Raise RequestError when it is none.

    One client's key is not another's: it counts together with the API key that it was sent with, however the header
    Authorization was written. The body is what it
    says as JSON, whatever its spaces and the order of its names, and where it was sent to.
    """
    found = request.headers.getlist(HEADER)
    if not found:
        return None
    if len(found) > 1:
        message = f"the header Idempotency-Key may be sent once, not {len(found)} times"
        raise RequestError(message, param="Idempotency-Key", code="invalid_value")
    given = found[0]
    if not 0 < len(given) <= MAX_CHARS:
        message = f"the header Idempotency-Key must have 1 to {MAX_CHARS} characters, not {len(given)}"
        raise RequestError(message, param="Idempotency-Key", code="invalid_value")
    scheme, _, api_key = request.headers.get("authorization", "").partition(" ")
    try:
        said = orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:  # of what was parsed, depth alone cannot be written again
        message = f"under an Idempotency-Key a body may nest arrays and objects up to {MAX_DEPTH} levels deep"
        raise RequestError(message, code="invalid_json") from None
    return Sent(
        _digest(scheme.lower().encode(), api_key.strip().encode(), given.encode()),
        _digest(request.url.path.encode(), said),
    )


def _digest(*parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def another_body(request_id: str) -> Failure:
    """The key belongs to a request that said something else."""
    message = f"this Idempotency-Key was sent with another body, which is request {request_id}: take a new key"
    return Failure(422, message, "invalid_request_error", "idempotency_key_reused", "Idempotency-Key")
