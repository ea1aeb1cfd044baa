"""URLs without their secrets, for messages."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

_HIDDEN = "***"
_SECRET_FIELDS = frozenset({"password", "username"})


def has_secret(url: str) -> bool:
    """True when a URL carries a password, in the usual place or as a query field."""
    return redact(url) != url


def redact(url: str) -> str:
    """Return the URL with user, password and secret query fields replaced; text that is no URL becomes ***."""
    try:
        parts = urlsplit(url)
        fields = parse_qsl(parts.query, keep_blank_values=True)
    except ValueError:
        return _HIDDEN
    where = parts.netloc
    if "@" in where:
        where = f"{_HIDDEN}@{where.rpartition('@')[2]}"
    elif "@" in url.partition("?")[0] and parts.scheme != "unix":
        return _HIDDEN  # a password with a slash in it ends the netloc early
    if any(name in _SECRET_FIELDS for name, _ in fields):
        query = urlencode([(n, _HIDDEN if n in _SECRET_FIELDS else v) for n, v in fields], safe="*")
    else:
        query = parts.query
    if where == parts.netloc and query == parts.query:
        return url
    return urlunsplit((parts.scheme, where, parts.path, query, parts.fragment))
