"""One streamed completion, timed. While the stream runs only times and bytes are kept; they are read afterwards."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx

from .figures import Sample
from .workload import Ask

PATH = "/v1/completions"
#: The longest piece of a server's words that is kept, in characters.
_WORDS = 120


@dataclass(frozen=True, slots=True)
class Manner:
    """What is the same in all requests of a run. `timeout_s` is for a whole answer."""

    model: str
    temperature: float = 0.0
    ignore_eos: bool = True
    timeout_s: float = 600.0

    def body(self, ask: Ask) -> dict[str, Any]:
        body = {
            "model": self.model,
            "prompt": ask.prompt,
            "max_tokens": ask.output,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return body | {"ignore_eos": True} if self.ignore_eos else body


async def send(client: httpx.AsyncClient, manner: Manner, ask: Ask, start: float) -> Sample:
    """Stream one answer to its end. Whatever goes wrong is in the sample. Cancelled, it closes the connection."""
    begun = time.perf_counter()
    try:
        async with (
            asyncio.timeout(manner.timeout_s),
            client.stream("POST", PATH, json=manner.body(ask), headers={"accept-encoding": "identity"}) as response,
        ):
            reads = [(time.perf_counter() - begun, data) async for data in response.aiter_raw()]
    except TimeoutError:
        return Sample(start, f"no end after {manner.timeout_s:g} s")
    except httpx.HTTPError as error:
        return Sample(start, f"{type(error).__name__}: {str(error) or 'no words'}"[:_WORDS])
    if response.status_code != 200:
        return Sample(start, _refusal(response.status_code, b"".join(data for _, data in reads)))
    return read_stream(events(reads), ask, start, exact=manner.ignore_eos)


def events(reads: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The data of each server-sent event, with the time of the read that completed its line."""
    rest = b""
    for at, data in reads:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield at, line[5:].strip()


def read_stream(found: Iterable[tuple[float, bytes]], ask: Ask, start: float, *, exact: bool) -> Sample:
    """Judge a stream by its events. `exact`: an answer of another length than asked for is a failure.

    The first token's time is that of the first frame with text, the last token's that of the last frame of the
    answer, with text or with the finish reason.
    """
    texts: list[float] = []
    last, finish, usage = 0.0, "", None
    for at, data in found:
        if data == b"[DONE]":
            break
        try:
            frame = json.loads(data)
        except ValueError:
            return Sample(start, f"a frame is not JSON: {data[:_WORDS]!r}")
        if problem := frame.get("error"):
            return Sample(start, f"error event: {_message(problem)}"[:_WORDS])
        usage = frame.get("usage") or usage
        for choice in frame.get("choices") or ():
            last, finish = at, choice.get("finish_reason") or finish
            if choice.get("text"):
                texts.append(at)
    if not finish:
        return Sample(start, "the stream ended before its finish reason")
    told: dict[str, Any] = usage or {"prompt_tokens": 0, "completion_tokens": len(texts)}
    tokens = int(told["completion_tokens"])
    if exact and usage and tokens != ask.output:
        return Sample(start, f"ended by {finish} with another number of tokens than asked for")
    first = texts[0] if texts else last
    gaps = [later - sooner for sooner, later in pairwise(texts)]
    cached = int((told.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    return Sample(start, "", first, last, int(told["prompt_tokens"]), tokens, cached, gaps, usage is None)


def _refusal(status: int, body: bytes) -> str:
    try:
        words = _message(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        words = body.decode(errors="replace").strip().partition("\n")[0]
    return f"status {status}: {words}"[:_WORDS]


def _message(problem: Any) -> str:
    return str(problem.get("message", problem)) if isinstance(problem, dict) else str(problem)
