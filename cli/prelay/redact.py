"""URLs without their secrets, for messages."""

from __future__ import annotations

import re

_HIDDEN = "***"
_FIELDS = re.compile(r"([?&](?:password|username)=)[^&#]*")


def has_secret(url: str) -> bool:
    """True when a URL carries a user or a password, in the usual place or as a query field."""
    return redact(url) != url


def redact(url: str) -> str:
    """Return the URL with user, password and secret query fields replaced.

    Works on the text and not on a parsed URL: a password may hold characters that end its part early, and then
    it would show. Rather too much is hidden than too little.
    """
    scheme, mark, rest = _FIELDS.sub(rf"\1{_HIDDEN}", url).partition("://")
    is_path = scheme == "unix" and rest.startswith("/")
    if "@" in rest and not is_path:
        rest = f"{_HIDDEN}@{rest.rpartition('@')[2]}"
    return scheme + mark + rest
