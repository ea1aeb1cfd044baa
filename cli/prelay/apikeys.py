"""API keys: what one may look like, and where they come from."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import BadUsage

if TYPE_CHECKING:
    from .settings import Settings

#: Between the keys of PRELAY_API_KEY.
SEPARATOR = ","
#: Characters of one key.
MAX_CHARS = 512
#: Printable ASCII, which every client can put into a header, without what separates keys.
_KEY = re.compile(r"[!-+\--~]+")


def split_keys(text: str) -> list[str]:
    """The keys of one text. An empty place between two commas is a key of no characters, and refused as one."""
    return [key.strip() for key in text.split(SEPARATOR)]


def check_key(key: str) -> str | None:
    """Say what is wrong with a key, without showing it."""
    if not 0 < len(key) <= MAX_CHARS:
        return f"must have 1 to {MAX_CHARS} characters, not {len(key)}"
    return None if _KEY.fullmatch(key) else "must be of printable ASCII characters without spaces and commas"


def api_keys(settings: Settings) -> tuple[str, ...]:
    """Return the keys of the settings and of the file they name. None: everybody may ask. Raise BadUsage."""
    given = [key.get_secret_value() for key in settings.api_key]
    named = () if settings.api_key_file is None else _read(settings.api_key_file)
    return tuple(dict.fromkeys([*given, *named]))


def bearer(keys: Iterable[str]) -> dict[str, str]:
    """Return the header that a request of ours needs where these keys are asked for."""
    key = next(iter(keys), None)
    return {} if key is None else {"authorization": f"Bearer {key}"}


def client_headers(keys: str | None) -> dict[str, str]:
    """Return the header of a client that was given this; of several keys any will do. Raise BadUsage."""
    if not keys:
        return {}
    first = split_keys(keys)[0]
    if problem := check_key(first):
        raise BadUsage(f"--api-key {problem}")
    return bearer([first])


def _read(path: Path) -> list[str]:
    """A file without a key is an error: the server would be open to everybody, and nobody would have said so."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise BadUsage(f"api_key_file {path} cannot be read: {why}") from None
    found = []
    for number, line in enumerate(lines, 1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if problem := check_key(key):
            raise BadUsage(f"api_key_file {path}, line {number}: a key {problem}")
        found.append(key)
    if not found:
        raise BadUsage(f"api_key_file {path} holds no key")
    return found
