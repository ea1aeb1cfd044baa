"""Lines of a batch: what one line of the input asks for or why it is not run, and the lines that are written.

An input line is `{"custom_id", "method": "POST", "url", "body"}`, OpenAI's form. A refusal names the field, the limit
and the value, and concerns its line only. Output and error lines have OpenAI's form too; their `id` ends with the
number of the input line, counted from 0; they come without their line break.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from .checks import show
from .errors import RequestError
from .render import error_body
from .request import ChatRequest, CompletionRequest
from .validate import chat_request, completion_request

#: What a batch may be for, and how the body of its lines is read.
ENDPOINTS: dict[str, Callable[[object], CompletionRequest | ChatRequest]] = {
    "/v1/completions": completion_request,
    "/v1/chat/completions": chat_request,
}
#: Characters of a custom_id.
MAX_CUSTOM_ID = 512

_FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A line that can be run."""

    custom_id: str
    request: CompletionRequest | ChatRequest


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a line was not answered.

    `status` is that of the answer which the same request would get from the server; 0 where there is no request to
    answer (the line cannot be read) or nobody ran it. `custom_id` is None where there is none that is this line's.
    """

    custom_id: str | None
    code: str
    message: str
    status: int = 0
    type: str = "invalid_request_error"
    param: str | None = None

    @property
    def body(self) -> bytes:
        """OpenAI's error object."""
        return error_body(self.message, type=self.type, param=self.param, code=self.code)


def is_blank(raw: bytes) -> bool:
    """Whether a line of the file is none."""
    return not raw.removeprefix(codecs.BOM_UTF8).strip()


def read_line(raw: bytes, endpoint: str) -> BatchRequest | Refusal:
    """Read one line, with or without its line break or a byte order mark. `endpoint` is one of ENDPOINTS."""
    custom_id: str | None = None
    try:
        line = _object(raw)
        custom_id = _custom_id(line)
        body = _body(line, endpoint)
    except _BadLineError as bad:
        return Refusal(custom_id, bad.code, str(bad))
    try:
        request = ENDPOINTS[endpoint](body)
        if request.stream:
            message = "stream is true, but the lines of a batch are answered whole: leave it out"
            raise RequestError(message, param="stream", code="invalid_value")
    except RequestError as error:
        return refused(custom_id, error)
    return BatchRequest(custom_id, request)


def custom_id_of(raw: bytes) -> str | None:
    """The custom_id of a line, whatever else is wrong with it; None where it has none."""
    try:
        return _custom_id(_object(raw))
    except _BadLineError:
        return None


def refused(custom_id: str, error: RequestError) -> Refusal:
    """What the server would answer to the line's request."""
    return Refusal(custom_id, error.code or "invalid_request", error.message, error.status, error.type, error.param)


def doubled(custom_id: str) -> Refusal:
    """A line whose custom_id an earlier line has. It has none that is its own, so it is told by its number."""
    return Refusal(None, "duplicate_custom_id", f"custom_id {show(custom_id)} stands in an earlier line too")


def answer_line(batch_id: str, number: int, custom_id: str, request_id: str, body: bytes) -> bytes:
    """A line of the output file. `body` is the whole answer, JSON."""
    return _line(batch_id, number, custom_id, _response(200, request_id, body), None)


def refusal_line(batch_id: str, number: int, refusal: Refusal, request_id: str) -> bytes:
    """A line of the error file."""
    if refusal.status:
        response = _response(refusal.status, request_id, refusal.body)
        return _line(batch_id, number, refusal.custom_id, response, None)
    error: dict[str, Any] = {"code": refusal.code, "message": refusal.message}
    if refusal.custom_id is None:
        error["line"] = number + 1
    return _line(batch_id, number, refusal.custom_id, None, error)


def _response(status: int, request_id: str, body: bytes) -> dict[str, Any]:
    return {"status_code": status, "request_id": request_id, "body": orjson.Fragment(body)}


def _line(
    batch_id: str, number: int, custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None
) -> bytes:
    name = f"batch_req_{batch_id.removeprefix('batch_')}_{number}"
    return orjson.dumps({"id": name, "custom_id": custom_id, "response": response, "error": error})


class _BadLineError(Exception):
    """The line is no request at all."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def _object(raw: bytes) -> dict[str, Any]:
    try:
        line = orjson.loads(raw.removeprefix(codecs.BOM_UTF8))
    except orjson.JSONDecodeError as error:
        raise _BadLineError("invalid_json", f"the line is not valid JSON: {error}") from None
    if not isinstance(line, dict):
        found = "null" if line is None else f"{type(line).__name__} {show(line)}"
        raise _BadLineError("invalid_line", f"the line must be a JSON object, not {found}")
    return line


def _custom_id(line: dict[str, Any]) -> str:
    found = line.get("custom_id")
    if found is None:
        raise _BadLineError("missing_custom_id", "custom_id is missing")
    if not isinstance(found, str) or not 1 <= len(found) <= MAX_CUSTOM_ID:
        size = f" of {len(found)} characters" if isinstance(found, str) else ""
        message = f"custom_id must be a string of 1 to {MAX_CUSTOM_ID} characters, not {show(found)}{size}"
        raise _BadLineError("invalid_custom_id", message)
    return found


def _body(line: dict[str, Any], endpoint: str) -> object:
    for name in line:
        if name not in _FIELDS:
            message = f"{show(name)} is not a field of a line: it has {', '.join(_FIELDS)}"
            raise _BadLineError("unknown_field", message)
    for name, wanted in (("method", "POST"), ("url", endpoint)):
        if line.get(name) != wanted:
            found = show(line[name]) if line.get(name) is not None else "missing"
            raise _BadLineError(f"invalid_{name}", f"{name} must be {wanted!r} in this batch, but it is {found}")
    body = line.get("body")
    if not isinstance(body, dict):
        found = "missing" if body is None else f"{type(body).__name__} {show(body)}"
        raise _BadLineError("invalid_body", f"body must be a JSON object, but it is {found}")
    return body
