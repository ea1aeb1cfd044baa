"""What a run wrote behind its last checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class Written:
    """A whole line of a part: which line of the input it answers, where it ends, and its usage."""

    line: int
    end: int  # byte in the part behind its line break
    prompt_tokens: int
    completion_tokens: int


def read_tail(path: Path, begin: int) -> Iterator[Written]:
    """The lines from byte `begin` on, up to the first that is torn, or is none of ours."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(begin)
        for raw in file:
            begin += len(raw)
            written = _read(raw, begin)
            if written is None:
                return
            yield written


def _read(raw: bytes, end: int) -> Written | None:
    if not raw.endswith(b"\n"):
        return None
    try:
        found = orjson.loads(raw)
        line = int(found["id"].rpartition("_")[2])
    except (ValueError, TypeError, KeyError, AttributeError):
        return None  # after a power cut even zeros may stand there
    usage = _usage(found)
    return Written(line, end, _count(usage, "prompt_tokens"), _count(usage, "completion_tokens"))


def _usage(found: dict[str, Any]) -> dict[str, Any]:
    place: Any = found
    for name in ("response", "body", "usage"):
        place = place.get(name) if isinstance(place, dict) else None
    return place if isinstance(place, dict) else {}


def _count(usage: dict[str, Any], name: str) -> int:
    value = usage.get(name)
    return value if isinstance(value, int) else 0
