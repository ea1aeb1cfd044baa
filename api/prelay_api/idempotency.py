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
#: What the official clients say of themselves: how often they have sent this request before. They have no key.
RETRY_HEADER = "x-stainless-retry-count"
#: What lasts is known under a key for so long, and where a client repeats by itself, seconds: it waits ten minutes for
#: an answer.
KEY_KEPT_S, RETRY_KEPT_S = 86_400.0, 660.0
#: Characters of a key.
MAX_CHARS = 255
#: Arrays and objects inside each other in a body that comes under a key: as many as orjson writes.
MAX_DEPTH = 254


@dataclass(frozen=True, slots=True)
class Sent:
    """What stands in the queue of a key and of the body sent under it: digests, so that neither can be read there."""

    key: str
    digest: str


@dataclass(frozen=True, slots=True)
class Resend:
    """A request for something that lasts, and how long ago it may have been sent before, seconds; 0: it is new."""

    sent: Sent
    within_s: float


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
    return Sent(_digest(*_client(request), given.encode()), _said(request, body))


def resent(request: Request, body: Any) -> Resend:
    """How a request for something that lasts is told from one that was sent before: by its key; without one by what it
    says, and only if its client says that it sends it again. Raise RequestError."""
    sent = sent_under(request, body)
    if sent is not None:
        return Resend(sent, KEY_KEPT_S)
    said = _said(request, body)
    count = request.headers.get(RETRY_HEADER, "0")
    again = count.isdecimal() and count.strip("0") != ""
    return Resend(Sent(_digest(*_client(request), said.encode(), b"resent"), said), RETRY_KEPT_S if again else 0.0)


def _client(request: Request) -> tuple[bytes, bytes]:
    scheme, _, api_key = request.headers.get("authorization", "").partition(" ")
    return scheme.lower().encode(), api_key.strip().encode()


def _said(request: Request, body: Any) -> str:
    """A digest of the body and of where it was sent to. Raise RequestError."""
    try:
        said = orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:  # of what was parsed, depth alone cannot be written again
        message = f"under an Idempotency-Key a body may nest arrays and objects up to {MAX_DEPTH} levels deep"
        raise RequestError(message, code="invalid_json") from None
    return _digest(request.url.path.encode(), said)


def _digest(*parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def another_body(before: str) -> Failure:
    """The key belongs to a request that said something else: `before` is what that is called."""
    message = f"this Idempotency-Key was sent with another body, which is {before}: take a new key"
    return Failure(422, message, "invalid_request_error", "idempotency_key_reused", "Idempotency-Key")
