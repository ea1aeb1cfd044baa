"""The body of a request: read up to a limit, parsed as JSON."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable
from typing import Any, TypeVar

import orjson
from starlette.requests import Request

from prelay_text.errors import RequestError

from .errors import BodyTooLarge

#: Arrays and objects inside each other that are still parsed: orjson's own limit.
MAX_DEPTH = 1024
#: Bodies beyond this many bytes are parsed, checked and tokenised in a thread.
LONG_BODY = 32 * 1024

T = TypeVar("T")

_BOMS = {codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32"} | {
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


async def understand(request: Request, limit: int, read: Callable[[Any], T]) -> tuple[T, bool]:
    """What `read` makes of the body as JSON, and whether that is a long one.

    A long one is parsed and read in a thread: checking a quarter of a million messages takes a second, in which no
    stream of this process would get a token. Raise RequestError, BodyTooLarge, and what `read` raises.
    """
    check_encoding(request)
    raw = await read_body(request, limit)
    long = len(raw) > LONG_BODY

    def work() -> T:
        return read(parse_json(raw))

    return (await asyncio.to_thread(work) if long else work()), long


async def read_json(request: Request, limit: int) -> tuple[Any, int]:
    """The body as JSON, and how many bytes it has. Raise RequestError or BodyTooLarge."""
    check_encoding(request)
    raw = await read_body(request, limit)
    return parse_json(raw), len(raw)


def check_encoding(request: Request) -> None:
    """Refuse a body that is compressed, or in another character set than JSON's. Raise RequestError, 415.

    The type of its content is not looked at: a body is JSON or it is refused as such.
    """
    for name in ("content-encoding", "transfer-encoding"):
        coding = ", ".join(request.headers.getlist(name)).strip().lower()
        if coding not in ("", "identity", "chunked"):
            raise _unreadable(f"{name} is {coding[:100]!r}: send the body uncompressed")
    for part in request.headers.get("content-type", "").split(";")[1:]:
        name, _, value = part.partition("=")
        charset = value.strip().strip('"').lower()
        if name.strip().lower() == "charset" and charset not in ("utf-8", "utf8", "us-ascii", "ascii"):
            raise _unreadable(f"the charset of content-type is {charset[:100]!r}: JSON is sent as UTF-8")


def _unreadable(message: str) -> RequestError:
    return RequestError(message, code="unsupported_media_type", status=415)


async def read_body(request: Request, limit: int) -> bytes:
    """Read the whole body. Raise BodyTooLarge as soon as it is known to exceed `limit` bytes."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise BodyTooLarge(f"the request body has {declared} bytes; at most {limit} are taken")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise BodyTooLarge(f"the request body has more than the {limit} bytes that are taken")
        parts.append(part)
    return b"".join(parts)


def parse_json(raw: bytes) -> Any:
    """Parse strictly: UTF-8, with or without its byte order mark, finite numbers, whole characters, limited depth.

    Of a key that stands twice in an object the last value counts. Integers beyond 64 bits become floats, which the
    checks of parameters refuse. Raise RequestError when it is not JSON.
    """
    text = raw.removeprefix(codecs.BOM_UTF8)
    if not text.strip():
        raise RequestError("the request body is empty: send a JSON object", code="invalid_json")
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise RequestError(_explain(text, str(error)), code="invalid_json") from None


def _explain(raw: bytes, problem: str) -> str:
    for mark, name in _BOMS.items():
        if raw.startswith(mark):
            return f"the request body is {name}: JSON is sent as UTF-8"
    if "depth limit" in problem or "recursion" in problem.lower():  # newer and older words of orjson
        return f"the request body nests arrays and objects more than {MAX_DEPTH} levels deep"
    return f"the request body is not valid JSON: {problem}"
