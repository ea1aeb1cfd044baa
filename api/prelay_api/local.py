"""Who may operate a server without API keys: whoever asks from this machine, and is no web page."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from .outcome import Failure
from .replies import failed

#: What is below it shows and changes the work of all clients.
ADMIN_PATH = "/admin"

_ELSEWHERE = Failure(
    403,
    "the admin routes of a server without API keys answer only to its own machine: ask at http://127.0.0.1, or start"
    " the server with PRELAY_API_KEY or --api-key-file and send a key",
    "invalid_request_error",
    "admin_is_local",
)
_WEB_PAGE = Failure(
    403,
    "the admin routes of a server without API keys do not answer to web pages: this request names another host, or"
    " another origin, than this machine",
    "invalid_request_error",
    "admin_is_local",
)


class LocalAdmin:
    """Answers 403 in OpenAI's shape to whoever asks for an admin route from elsewhere.

    A page in a browser of this machine is elsewhere too: one that sends a form here, or whose name was pointed at this
    address (DNS rebinding). What a proxy on this machine passes on is local, unless it names the client in
    X-Forwarded-For.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = _problem(scope) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
        else:
            await failed(problem)(scope, receive, send)


def _problem(scope: Scope) -> Failure | None:
    path = scope["path"]
    if path != ADMIN_PATH and not path.startswith(f"{ADMIN_PATH}/"):
        return None
    client = scope.get("client")
    if client is not None and not _is_loopback(client[0]):  # None: a unix socket
        return _ELSEWHERE
    hosts, origins = (_values(scope, name) for name in (b"host", b"origin"))
    if not all(map(_is_own_name, hosts)) or any(origin.partition("://")[2] not in hosts for origin in origins):
        return _WEB_PAGE
    return None


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def _is_loopback(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return not address  # the peer of a unix socket has no address
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


def _is_own_name(host: str) -> bool:
    """An address of this machine, or a name that no name server on the internet answers for."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    is_plain = not {".", ":"} & set(name.rstrip("."))
    return is_plain or _is_loopback(name) or name.endswith(".localhost")
