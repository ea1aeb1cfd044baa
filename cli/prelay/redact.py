"""Secrets: URLs without theirs, for messages, and arguments without any, for everybody who lists processes."""

from __future__ import annotations

import re
from collections.abc import Sequence

_HIDDEN = "***"
#: Options whose URL may hold a password, and the variables that say the same.
_URLS = {"--redis-url": "PRELAY_REDIS_URL", "--batch-redis-url": "PRELAY_BATCH_REDIS_URL"}
_FIELDS = re.compile(r"([?&](?:password|username)=)[^&#]*")


def secrets_of(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Split arguments into those that may be seen, and variables for what may not: API keys, a URL with a password."""
    rest: list[str] = []
    found: dict[str, str] = {}
    keys: list[str] = []
    words = iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag != "--api-key" and flag not in _URLS:
            rest.append(word)
            continue
        given = value if equals else next(words, None)
        if flag == "--api-key" and given:
            keys.append(given)
        elif given is not None and has_secret(given):
            found[_URLS[flag]] = given
        else:
            rest += [word] if equals or given is None else [word, given]
    return rest, found | ({"PRELAY_API_KEY": ",".join(keys)} if keys else {})


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
