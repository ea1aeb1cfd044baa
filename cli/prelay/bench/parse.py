"""Lists and sizes as they are written on the command line."""

from __future__ import annotations

import re

from ..errors import BadUsage

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def numbers(text: str, option: str) -> tuple[float, ...]:
    """Read "1,2.5". Raise BadUsage for anything but positive numbers; an empty text is none."""
    try:
        found = tuple(float(part) for part in text.split(",") if text)
    except ValueError:
        found = (0.0,)
    if not all(0 < number < float("inf") for number in found):
        raise BadUsage(f"{option} must be positive numbers with commas between, not {text!r}")
    return found


def counts(text: str, option: str) -> tuple[int, ...]:
    """Read "1,8,32" in the same way, whole numbers only."""
    if not re.fullmatch(r"([1-9]\d*(,[1-9]\d*)*)?", text):
        raise BadUsage(f"{option} must be whole numbers of at least 1 with commas between, not {text!r}")
    return tuple(int(part) for part in text.split(",") if part)


def size(text: str, option: str) -> int:
    """Read "1GB" or "500MiB" as bytes. Raise BadUsage."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?B|)", text.strip().upper())
    if not found or found[2] not in _UNITS or not float(found[1]) > 0:
        raise BadUsage(f"{option} must be a size like 1GB or 500MiB, not {text!r}")
    return round(float(found[1]) * _UNITS[found[2]])
