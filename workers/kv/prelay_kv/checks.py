"""Strict checks for values that came from another process. Each raises ValueError with the field's name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

#: Largest size or count accepted, so that a product of a few stays exact and printable.
MAX_INT = 2**48
MAX_TEXT = 256
#: Largest size of a pool in bytes.
MAX_NBYTES = 2**62
MAX_UINT64 = 2**64 - 1


def exact_fields(cls: type[Any], data: object) -> dict[str, Any]:
    """`data` as a dict that has the fields of dataclass `cls` and no others."""
    if not isinstance(data, dict):
        raise ValueError(f"{cls.__name__} is {type(data).__name__}, not an object")
    wanted = {field.name for field in fields(cls)}
    if wanted != data.keys():
        raise ValueError(f"{cls.__name__} has not exactly the fields {sorted(wanted)}")
    return data


def need_int(name: str, value: object, low: int, high: int = MAX_INT) -> int:
    """`value` as an int of low … high; True and 1.0 are not ints."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} must be an integer of {low} to {high}, not {value!r:.40}")
    return value


def need_text(name: str, value: object) -> str:
    """`value` as a short text without control characters or lone surrogates, so that it always encodes."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT or not value.isprintable():
        raise ValueError(f"{name} must be a printable text of 1 to {MAX_TEXT} characters, not {value!r:.40}")
    return value
