"""Query parameters of the admin routes: what they may be, for the routes and for the OpenAPI page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prelay_queue.job import Priority
from prelay_queue.state import State
from prelay_text.errors import RequestError

from .jobs import Wanted

#: Entries of one listing.
DEFAULT_LIMIT, MAX_LIMIT = 100, 1000

#: States of a job that is not over.
STATES = tuple(state.value for state in State if state is not State.DONE)

_SCHEMAS: dict[str, dict[str, Any]] = {
    "state": {"type": "string", "enum": list(STATES)},
    "priority": {"type": "string", "enum": [priority.value for priority in Priority]},
    "worker": {"type": "string", "description": "Any part of the name of the worker that has it."},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
}
OF_JOBS = ("state", "priority", "worker", "limit")
OF_LETTERS = ("limit",)


def documented(names: tuple[str, ...]) -> dict[str, Any]:
    """The parameters for the OpenAPI page."""
    return {"parameters": [{"name": name, "in": "query", "schema": _SCHEMAS[name]} for name in names]}


def wanted_jobs(given: Mapping[str, str]) -> Wanted:
    """Raise RequestError for what is unknown or wrong."""
    known = _known(given, OF_JOBS)
    words = {name: _one_of(name, known[name]) for name in ("state", "priority") if name in known}
    return Wanted(**words, worker=known.get("worker", ""), limit=_limit(known))


def wanted_letters(given: Mapping[str, str]) -> int:
    """How many. Raise RequestError for what is unknown or wrong."""
    return _limit(_known(given, OF_LETTERS))


def _known(given: Mapping[str, str], names: tuple[str, ...]) -> Mapping[str, str]:
    for name in given:
        if name not in names:
            message = f"unknown query parameter {name[:100]!r}; there are {', '.join(names)}"
            raise RequestError(message, param=name[:100], code="unknown_parameter")
    return given


def _one_of(name: str, value: str) -> str:
    values = _SCHEMAS[name]["enum"]
    if value not in values:
        raise RequestError(
            f"{name} must be {' or '.join(values)}, not {value[:100]!r}", param=name, code="invalid_value"
        )
    return value


def _limit(given: Mapping[str, str]) -> int:
    raw = given.get("limit", str(DEFAULT_LIMIT))
    if not (raw.isascii() and raw.isdigit() and len(raw) < 6 and 1 <= int(raw) <= MAX_LIMIT):
        message = f"limit must be a whole number from 1 to {MAX_LIMIT}, not {raw[:100]!r}"
        raise RequestError(message, param="limit", code="invalid_value")
    return int(raw)
