"""Settings that have a number for each class of requests: `500`, or `normal=500,batch=0`."""

from __future__ import annotations

from collections.abc import Mapping


def per_class(words: str, defaults: Mapping[str, int]) -> dict[str, int]:
    """Read such a setting: one number for all, or some by name. Raise ValueError, which says what it may be."""
    if words.strip().isdecimal():
        return dict.fromkeys(defaults, _number(words))
    found = dict(defaults)
    for part in words.split(","):
        name, equals, number = (word.strip() for word in part.partition("="))
        if not equals or name not in found:
            raise ValueError(f"must be a number, or class=number for some of {', '.join(defaults)}")
        found[name] = _number(number)
    return found


def written(numbers: Mapping[str, int]) -> str:
    """The same as one word, which `per_class` reads again."""
    return ",".join(f"{name}={number}" for name, number in numbers.items())


def _number(words: str) -> int:
    if not words.strip().isdecimal() or not 0 <= (number := int(words[:20])) <= 10**12:
        raise ValueError(f"needs numbers from 0 to {10**12}, 0 for no limit")
    return number


#: Requests, one for each of their choices, that may wait.
QUEUED_JOBS = {"interactive": 256, "normal": 1024, "batch": 10_000}
#: Tokens of their prompts.
QUEUED_TOKENS = {"interactive": 512_000, "normal": 2_000_000, "batch": 20_000_000}
