"""The password of the queue's Redis, out of a file into its URL: containers get secrets as files."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

from .errors import BadUsage

#: Bytes of such a file.
MAX_BYTES = 4096


def with_password(url: str, path: Path) -> str:
    """Return the URL with the password that a file holds, its only line. Raise BadUsage, which never shows it."""
    parts = urlsplit(url)
    if parts.password is not None or "password=" in parts.query:
        raise BadUsage("redis_password_file and a --redis-url with a password: which of the two?")
    user, _, place = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user}:{quote(_read(path), safe='')}@{place}"))


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        lines = text.decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise BadUsage(f"redis_password_file {path} cannot be read: {why}") from None
    if len(text) > MAX_BYTES:
        raise BadUsage(f"redis_password_file {path} must have at most {MAX_BYTES} bytes")
    if len(lines) != 1 or not lines[0]:
        raise BadUsage(f"redis_password_file {path} must have one line, the password, not {len(lines)} lines")
    return lines[0]
