"""Who may ask: with API keys configured, whoever sends one of them."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from .outcome import Failure
from .replies import failed

#: Load balancers and orchestrators ask these, and have no key.
OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})

_CHALLENGE = {"www-authenticate": "Bearer"}
_MISSING = Failure(
    401,
    "no API key was sent: this server wants the header Authorization: Bearer KEY",
    "invalid_request_error",
    "missing_api_key",
)
_WRONG = Failure(401, "the API key is not one of this server's", "invalid_request_error", "invalid_api_key")


class RequireKey:
    """Answers 401 in OpenAI's shape to whoever sends no key, or a wrong one. Keeps no key, only their digests."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = tuple(_digest(key.encode()) for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(scope) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
        else:
            await failed(problem, _CHALLENGE)(scope, receive, send)

    def _problem(self, scope: Scope) -> Failure | None:
        if scope["path"] in OPEN_PATHS:
            return None
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if not given:
            return _MISSING
        scheme, _, key = given[0].partition(b" ")
        if len(given) > 1 or scheme.lower() != b"bearer":
            return _WRONG
        return None if self._knows(key.strip()) else _WRONG

    def _knows(self, key: bytes) -> bool:
        """Every digest is compared in full, so that the time tells nothing of a key."""
        found = [hmac.compare_digest(_digest(key), digest) for digest in self._digests]
        return any(found)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
