"""A client that checks every token of a stream against the null model's chain.

The tokenizer of the bed shows each id as a word, so the text of a stream is its ids. In plain mode the whole chain is
computed again. In divergent mode each token depends on the attempt that made it too: it must be the token of some
epoch, and the epochs must not fall along the answer; so a resume that kept the wrong tokens cannot hide.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from prelay_worker.null import null_token

from .http import client_of
from .tokenizer import WORDS, ids_of

#: More attempts than any test makes.
MAX_EPOCHS = 64


@dataclass(frozen=True, slots=True)
class Frame:
    """One server-sent event, and when it came (monotonic seconds)."""

    id: str
    data: bytes
    at: float


@dataclass(slots=True)
class Heard:
    """One choice as its client heard it."""

    index: int
    text: str = ""
    roles: int = 0
    finishes: list[str] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return ids_of(self.text)


@dataclass(slots=True)
class Stream:
    """A whole stream."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    frames: list[Frame] = field(default_factory=list)
    choices: dict[int, Heard] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, int] | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    said: list[str] = field(default_factory=list)  # in comments

    @property
    def comments(self) -> int:
        return len(self.said)

    @property
    def id(self) -> str:
        return str(self.bodies[0]["id"])

    def take(self, frame: Frame) -> None:
        """Take one frame in. Nothing may follow [DONE]."""
        assert not self.done, f"a frame after [DONE]: {frame}"
        self.frames.append(frame)
        if frame.data == b"[DONE]":
            self.done = True
            return
        body = orjson.loads(frame.data)
        self.bodies.append(body)
        if "error" in body:
            self.error = body["error"]
            return
        self.usage = body.get("usage") or self.usage
        for choice in body["choices"]:
            self._take_choice(choice)

    def _take_choice(self, choice: dict[str, Any]) -> None:
        heard = self.choices.setdefault(choice["index"], Heard(choice["index"]))
        assert not heard.finishes, f"choice {heard.index} goes on after its end"
        delta = choice.get("delta", {})
        heard.roles += "role" in delta
        heard.text += choice.get("text") or delta.get("content") or ""
        if choice["finish_reason"] is not None:
            heard.finishes.append(choice["finish_reason"])


async def read_frames(response: httpx.Response, found: Stream) -> None:
    """Read events as the standard says, and hold the server to our own rules for comments and empty events."""
    fields: list[tuple[str, str]] = []
    async for line in response.aiter_lines():
        if line.startswith(":"):
            found.said.append(line[1:].strip())
        elif line:
            name, _, value = line.partition(": ")
            fields.append((name, value))
        else:
            assert [name for name, _ in fields][-1:] == ["data"], f"an event without data: {fields}"
            event = dict(fields)
            assert len(event) == len(fields)
            found.take(Frame(event.get("id", ""), event["data"].encode(), time.monotonic()))
            fields = []
    assert not fields, f"the stream was cut inside an event: {fields}"


async def stream(
    client: httpx.AsyncClient, path: str, body: dict[str, Any] | None, found: Stream | None = None
) -> Stream:
    """Post (without a body: get) and read to the end."""
    found = Stream() if found is None else found
    method, asked = ("GET", None) if body is None else ("POST", {"stream": True, **body})
    async with client.stream(method, path, json=asked) as response:
        found.status, found.headers = response.status_code, dict(response.headers)
        if response.status_code != 200:
            found.error = orjson.loads(await response.aread())["error"]
            return found
        await read_frames(response, found)
    return found


class Listener:
    """A stream that is read in a thread of its own, while the test makes things happen. `found` grows meanwhile."""

    def __init__(self, url: str, path: str, body: dict[str, Any] | None) -> None:
        self.found = Stream()
        self._pool = ThreadPoolExecutor(1)
        self._result = self._pool.submit(asyncio.run, self._read(url, path, body))

    async def _read(self, url: str, path: str, body: dict[str, Any] | None) -> None:
        async with client_of(url) as client:
            await stream(client, path, body, self.found)

    @property
    def ids(self) -> list[int]:
        """What the first choice has shown so far."""
        heard = self.found.choices.get(0)
        return heard.ids if heard else []

    def end(self, timeout_s: float = 30) -> Stream:
        """Wait for the end of the stream; raise what went wrong in reading it."""
        self._result.result(timeout_s)
        self._pool.shutdown()
        return self.found


class NullChain:
    """The null model along one answer: what `null_token` says after each prefix, in constant time for a token."""

    def __init__(self, prompt_ids: Sequence[int], vocab: int = WORDS) -> None:
        self._vocab = vocab
        self._digest = hashlib.blake2b(digest_size=8)
        for token in prompt_ids:
            self.push(token)

    def push(self, token: int) -> None:
        self._digest.update(token.to_bytes(4, "little"))

    def next(self, epoch: int | None) -> int:
        """The token that comes now, in attempt `epoch`; None in plain mode."""
        digest = self._digest.copy()
        if epoch is not None:
            digest.update(f"epoch {epoch}".encode())
        return int.from_bytes(digest.digest(), "little") % self._vocab


def expected_chain(prompt_ids: Sequence[int], count: int, vocab: int = WORDS) -> list[int]:
    """The plain null model's answer."""
    chain = NullChain(prompt_ids, vocab)
    ids: list[int] = []
    for _ in range(count):
        ids.append(chain.next(None))
        chain.push(ids[-1])
    assert not ids or ids[-1] == null_token((*prompt_ids, *ids[:-1]), None, vocab)  # the model itself
    return ids


def epochs_of(prompt_ids: Sequence[int], ids: Sequence[int], vocab: int = WORDS) -> list[int]:
    """For a divergent answer: the lowest epochs that may have made its tokens, never falling. Raise where none can."""
    chain, found = NullChain(prompt_ids, vocab), [1]
    for seq, token in enumerate(ids):
        epochs = (e for e in range(found[-1], found[-1] + MAX_EPOCHS) if chain.next(e) == token)
        epoch = next(epochs, None)
        assert epoch is not None, f"token {seq} of the answer is of no attempt from {found[-1]} on: {ids[: seq + 1]}"
        found.append(epoch)
        chain.push(token)
    return found[1:]


def check_chain(prompt_ids: Sequence[int], ids: Sequence[int], *, divergent: bool = False) -> None:
    """Contiguous and linked: no token doubled, dropped or of a discarded attempt."""
    if divergent:
        epochs_of(prompt_ids, ids)
    else:
        assert list(ids) == expected_chain(prompt_ids, len(ids))


def usage(prompt: int, answer: int, cached: int = 0) -> dict[str, Any]:
    """What an answer says of its tokens."""
    total = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
    return total | {"prompt_tokens_details": {"cached_tokens": cached}}


def check_stream(
    found: Stream,
    prompt_ids: Sequence[int],
    max_tokens: int,
    *,
    choices: int = 1,
    chat: bool = False,
    divergent: bool = False,
    lossy: bool = False,
) -> None:
    """All that must hold of a stream that ended well at max_tokens. `lossy`: Redis lost data meanwhile."""
    assert found.status == 200, found.error
    assert found.error is None, found.error
    assert found.done, "the stream has no [DONE]"
    assert sorted(found.choices) == list(range(choices))
    for heard in found.choices.values():
        assert heard.finishes == ["length"]
        assert heard.roles == (1 if chat else 0)
        assert len(heard.ids) == max_tokens
        check_chain(prompt_ids, heard.ids, divergent=divergent)
    check_cursors(found, choices, lossy=lossy)
    assert found.headers["x-request-id"] == found.id
    assert b"preempt" not in b"".join(frame.data for frame in found.frames)


def check_cursors(found: Stream, choices: int = 1, *, lossy: bool = False) -> None:
    """Every frame but [DONE], and the first of a chat's roles, has a cursor per choice, and none ever goes back.

    A Redis that lost data may have forgotten an epoch (`lossy`): then only the place in the answer never goes back.
    """
    last = [(0, 0)] * choices
    for frame in found.frames[max(0, choices - 1) if not found.frames[0].id else 0 : -1]:
        assert re.fullmatch(r"\d+-\d+(,\d+-\d+)*", frame.id), frame
        pairs = [one.split("-") for one in frame.id.split(",")]
        here = [(int(epoch), int(seq)) for epoch, seq in pairs]
        assert len(here) == choices
        rises = all((a <= c or lossy) and b <= d for (a, b), (c, d) in zip(last, here, strict=True))
        assert rises, f"{frame} after {last}"
        last = here
