"""The query of a list: a page of it, with every parameter known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request

from prelay_text.checks import show, wrong_value
from prelay_text.errors import RequestError

#: Reads the value of a parameter. Raises RequestError.
Read = Callable[[str, str], Any]


def whole(low: int, high: int) -> Read:
    """An integer in [low, high]."""

    def read(name: str, value: str) -> int:
        if not (value.isascii() and value.isdecimal() and low <= int(value[:12]) <= high):
            raise wrong_value(name, f"an integer from {low} to {high}", value)
        return int(value)

    return read


def among(*values: str) -> Read:
    def read(name: str, value: str) -> str:
        if value not in values:
            raise wrong_value(name, f"one of {', '.join(values)}", value)
        return value

    return read


def that_is(what: str, test: Callable[[str], bool]) -> Read:
    """A string that passes `test`, and is called `what` where it does not."""

    def read(name: str, value: str) -> str:
        if not test(value):
            raise wrong_value(name, what, value)
        return value

    return read


def read_query(request: Request, wanted: Mapping[str, tuple[Read, Any]]) -> dict[str, Any]:
    """The values of the parameters, or their defaults. Raise RequestError for one that is wrong, twice or unknown."""
    given: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in wanted:
            message = f"{show(name)} is not a parameter of this list: it has {', '.join(wanted)}"
            raise RequestError(message, param=name[:64], code="unknown_parameter")
        if name in given:
            raise RequestError(f"{name} is given twice", param=name, code="invalid_value")
        given[name] = value
    return {name: read(name, given[name]) if name in given else default for name, (read, default) in wanted.items()}
