"""Where a body is read: a long one beside the event loop, which has streams to serve."""

from __future__ import annotations

import threading
from typing import Any

import orjson
import pytest
from starlette.requests import Request
from starlette.types import Message

from prelay_api.body import LONG_BODY, understand
from prelay_api.errors import BodyTooLarge
from prelay_text.errors import RequestError


def sent(raw: bytes) -> Request:
    async def receive() -> Message:
        return {"type": "http.request", "body": raw, "more_body": False}

    return Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)


def text(size: int) -> bytes:
    """A JSON string of so many bytes."""
    return orjson.dumps("x" * (size - 2))


@pytest.mark.parametrize(("size", "long"), [(10, False), (LONG_BODY, False), (LONG_BODY + 1, True)])
async def test_a_long_body_is_checked_in_a_thread(size: int, long: bool) -> None:
    def read(body: Any) -> tuple[int, bool]:
        return len(body), threading.current_thread() is threading.main_thread()

    assert await understand(sent(text(size)), 2 * LONG_BODY, read) == ((size - 2, not long), long)


@pytest.mark.parametrize("size", [10, LONG_BODY + 1])
async def test_what_is_wrong_is_raised_wherever_it_was_read(size: int) -> None:
    def read(_: Any) -> None:
        raise RequestError("no")

    with pytest.raises(RequestError, match="no"):
        await understand(sent(text(size)), 2 * LONG_BODY, read)
    with pytest.raises(RequestError, match="not valid JSON"):
        await understand(sent(text(size)[1:]), 2 * LONG_BODY, read)
    with pytest.raises(BodyTooLarge):
        await understand(sent(text(size)), size - 1, read)
