"""Streams that outlive a lost connection, and the API process that they came from: a client for Python.

    from prelay.client import stream

    for chunk in stream("/v1/chat/completions", {"model": "demo", "messages": [...]}):
        print(chunk["choices"][0]["delta"].get("content", ""), end="")

Any client can do the same: send `Prefer: resumable`, remember the `id:` of the last frame, and after a loss GET
/v1/streams/<x-request-id> with Last-Event-ID. The request goes out under an Idempotency-Key, so that one which is lost
before its answer began is not run twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from .errors import CliError

URL = "http://127.0.0.1:8000"
#: How long the helper tries on after it last heard anything, seconds.
PATIENCE_S = 60.0
#: Silence in which a server that lives would have sent a comment, seconds.
SILENCE_S = 30.0
#: How long the helper waits for the answer to its cancel, seconds.
FAREWELL_S = 2.0
#: Statuses that say: not now.
_LATER = (408, 429, 502, 503, 504)


class StreamError(CliError):
    """The stream ended with an error, or could not begin. `code` is OpenAI's, `status` 200 in mid-stream."""

    def __init__(self, message: str, *, code: str | None = None, status: int = 200) -> None:
        super().__init__(message)
        self.code, self.status = code, status


def stream(
    path: str,
    body: Mapping[str, Any],
    *,
    url: str | Sequence[str] = URL,
    api_key: str | None = None,
    patience_s: float = PATIENCE_S,
) -> Generator[dict[str, Any], None, None]:
    """Yield the chunks of a stream, each once, whatever happens to connections and API processes meanwhile.

    `path` is /v1/completions or /v1/chat/completions. Several `url`s are tried in turn. Raise StreamError for what the
    server refuses or could not complete, and when nothing was heard for `patience_s`. Closed before its end (so does a
    loop that is left, when the generator is collected), it cancels the request.
    """
    course = _Course(path, dict(body), _urls(url), api_key, patience_s)
    with httpx.Client(timeout=course.timeout, trust_env=False) as client:
        while not course.done:
            try:
                with client.stream(**course.request()) as response:
                    if course.begins(response.status_code, response.headers):
                        for line in response.iter_lines():
                            if (chunk := course.hear(line)) is not None:
                                yield chunk
                    else:
                        course.refused(response.status_code, response.read())
            except httpx.TransportError as error:
                course.lost(error)
            except GeneratorExit:
                if (wish := course.farewell()) is not None:
                    with contextlib.suppress(httpx.TransportError):
                        client.request(**wish)
                raise
            if not course.done:
                time.sleep(course.pause_s())


async def astream(
    path: str,
    body: Mapping[str, Any],
    *,
    url: str | Sequence[str] = URL,
    api_key: str | None = None,
    patience_s: float = PATIENCE_S,
) -> AsyncGenerator[dict[str, Any], None]:
    """The same for asyncio. A cancellation cancels the request, too, and takes up to FAREWELL_S if nobody answers."""
    course = _Course(path, dict(body), _urls(url), api_key, patience_s)
    async with httpx.AsyncClient(timeout=course.timeout, trust_env=False) as client:
        while not course.done:
            try:
                async with client.stream(**course.request()) as response:
                    if course.begins(response.status_code, response.headers):
                        async for line in response.aiter_lines():
                            if (chunk := course.hear(line)) is not None:
                                yield chunk
                    else:
                        course.refused(response.status_code, await response.aread())
            except httpx.TransportError as error:
                course.lost(error)
            except (GeneratorExit, asyncio.CancelledError):
                if (wish := course.farewell()) is not None:
                    with contextlib.suppress(httpx.TransportError):
                        await client.request(**wish)
                raise
            if not course.done:
                await asyncio.sleep(course.pause_s())


def _urls(url: str | Sequence[str]) -> tuple[str, ...]:
    return (url,) if isinstance(url, str) else tuple(url)


@dataclass
class _Course:
    """Where a stream stands, and what is to be asked next. No I/O."""

    path: str
    body: dict[str, Any]
    urls: tuple[str, ...]
    api_key: str | None
    patience_s: float
    done: bool = False
    request_id: str | None = None
    last_id: str | None = None
    _key: str = field(default_factory=lambda: str(uuid.uuid4()))
    _heard: float = field(default_factory=time.monotonic)
    _attempts: int = 0  # since anything was heard
    _wait_s: float = 0.0
    _event: dict[str, str] = field(default_factory=dict)
    _elsewhere: bool = False  # this server has said that it does not go on

    @property
    def timeout(self) -> httpx.Timeout:
        return httpx.Timeout(SILENCE_S, connect=5.0)

    def request(self) -> dict[str, Any]:
        """What to send now: the request, or once it has an id, the wish to go on."""
        base = self.urls[self._attempts % len(self.urls)].rstrip("/").removesuffix("/v1")
        headers = {"prefer": "resumable"} | ({"authorization": f"Bearer {self.api_key}"} if self.api_key else {})
        self._event, self._elsewhere = {}, False
        if self.request_id is None:
            body = {**self.body, "stream": True}
            return {"method": "POST", "url": f"{base}/{self.path.lstrip('/')}", "json": body} | {
                "headers": headers | {"idempotency-key": self._key}
            }
        if self.last_id is not None:
            headers["last-event-id"] = self.last_id
        return {"method": "GET", "url": f"{base}/v1/streams/{self.request_id}", "headers": headers}

    def farewell(self) -> dict[str, Any] | None:
        """What to send when nobody wants the rest: the server would keep the request for whoever comes back."""
        if self.request_id is None or self.done:
            return None
        wanted = self.request()
        return {"method": "DELETE", "url": wanted["url"], "headers": wanted["headers"], "timeout": FAREWELL_S}

    def begins(self, status: int, headers: httpx.Headers) -> bool:
        """Whether a stream comes."""
        self._wait_s = _seconds(headers.get("retry-after"))
        if status != 200:
            return False
        self.request_id = self.request_id or headers.get("x-request-id")
        return True

    def hear(self, line: str) -> dict[str, Any] | None:
        """Take one line; return the chunk that it completes. Raise StreamError for an error in the stream."""
        self._heard, self._attempts = time.monotonic(), 0
        if line:
            name, _, value = line.partition(":")
            if name:
                self._event[name] = value.removeprefix(" ")
            return None
        event, self._event = self._event, {}
        if "data" not in event:
            return None
        if event["data"] == "[DONE]":
            self.done = not self._elsewhere
            return None
        chunk: dict[str, Any] = orjson.loads(event["data"])
        if error := chunk.get("error"):
            if error.get("code") == "service_unavailable":  # the process shuts down: ask elsewhere
                self._elsewhere = True
                return None
            raise StreamError(str(error.get("message")), code=error.get("code"))
        self.last_id = event.get("id", self.last_id)
        return chunk

    def refused(self, status: int, raw: bytes) -> None:
        """No stream came. Raise StreamError unless it may come later."""
        try:
            error = orjson.loads(raw)["error"]
        except (ValueError, KeyError, TypeError):
            error = {"message": raw[:200].decode("utf-8", "replace")}
        if status not in _LATER or self._given_up(self._wait_s):
            raise StreamError(f"{status}: {error.get('message')}", code=error.get("code"), status=status)
        self._attempts += 1

    def lost(self, error: httpx.TransportError) -> None:
        """The connection broke. Raise StreamError when that has lasted too long."""
        if self._given_up():
            raise StreamError(f"nothing heard for {self.patience_s:g} s: {error or type(error).__name__}") from error
        self._attempts += 1

    def pause_s(self) -> float:
        """How long to wait before the next request."""
        return max(self._wait_s, min(2.0, 0.05 * 2.0 ** min(self._attempts, 10)))

    def _given_up(self, after_s: float = 0.0) -> bool:
        """Whether patience is over, or will be after that time."""
        return time.monotonic() + after_s - self._heard > self.patience_s


def _seconds(text: str | None) -> float:
    try:
        return max(0.0, float(text or 0))
    except ValueError:
        return 0.0
