"""What a client asks of a batch: the body of POST /v1/batches."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from prelay_text.batch_line import ENDPOINTS
from prelay_text.checks import Described, described, one_of, show, text, text_map, wrong_type, wrong_value
from prelay_text.errors import RequestError

_SECONDS = {"m": 60, "h": 3600, "d": 86400}
#: How long the window of a batch may be, seconds.
SHORTEST_WINDOW_S = 60
LONGEST_WINDOW_S = 30 * 86400
_WINDOW = re.compile(r"([1-9][0-9]{0,4})([mhd])")
_WANTED_WINDOW = 'a time from "1m" to "30d": a number and m, h or d, such as "24h"'


@described({"type": "string", "pattern": f"^{_WINDOW.pattern}$"})
def window(name: str, value: Any) -> int:
    """A completion window, kept as seconds."""
    if not isinstance(value, str):
        raise wrong_type(name, _WANTED_WINDOW, value)
    found = _WINDOW.fullmatch(value)
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
    if not SHORTEST_WINDOW_S <= seconds <= LONGEST_WINDOW_S:
        raise wrong_value(name, _WANTED_WINDOW, value)
    return seconds


def window_name(seconds: int) -> str:
    """A window in the words of a batch object: in hours where they are whole."""
    return f"{seconds // 3600}h" if seconds % 3600 == 0 else f"{seconds // 60}m"


_CHECKS: dict[str, Described[Any]] = {
    "input_file_id": text(1, 64),
    "endpoint": one_of({name: name for name in ENDPOINTS}),
    "completion_window": window,
    "metadata": text_map(16, 64, 512),
}
_REQUIRED = ("input_file_id", "endpoint", "completion_window")
_REFUSED = {"output_expires_after": "files are kept until they are deleted"}


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """A request for a batch, checked as far as that needs no disk."""

    input_file_id: str
    endpoint: str
    window_s: int
    metadata: dict[str, str]


def batch_order(body: object) -> BatchOrder:
    """Read the parsed body. Raise RequestError with the parameter, the limit and the value."""
    if not isinstance(body, dict):
        message = f"the request body must be a JSON object, not {'null' if body is None else show(body)}"
        raise RequestError(message, code="invalid_type")
    for name, value in body.items():
        _refuse(name, value)
    found = {name: _CHECKS[name](name, body[name]) for name in _CHECKS if _is_given(name, body)}
    return BatchOrder(
        found["input_file_id"], found["endpoint"], found["completion_window"], found.get("metadata") or {}
    )


def order_schema() -> dict[str, Any]:
    """The body as JSON Schema, for the OpenAPI page."""
    properties: dict[str, Any] = {name: check.schema for name, check in _CHECKS.items()}
    properties["metadata"] = {"anyOf": [properties["metadata"], {"type": "null"}]}
    return {
        "type": "object",
        "required": list(_REQUIRED),
        "properties": properties,
        "additionalProperties": False,
    }


def _is_given(name: str, body: dict[str, Any]) -> bool:
    if name in _REQUIRED and name not in body:
        raise RequestError(f"{name} is missing", param=name, code="missing_required_parameter")
    return name in _REQUIRED or body.get(name) is not None


def _refuse(name: str, value: Any) -> None:
    if name in _CHECKS:
        return
    if why := _REFUSED.get(name):
        if value is None:
            return
        message = f"{name} is not implemented: {why} (it was {show(value)})"
        raise RequestError(message, param=name, code="unsupported_parameter")
    message = f"{show(name)} is not a parameter of this request"
    raise RequestError(message, param=name[:64], code="unknown_parameter")
