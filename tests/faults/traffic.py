"""Clients over HTTP that ask again and again, each in another way, and whose every token is checked."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import httpx

from tests.bed.chain import Frame, Heard, Stream, check_chain, check_cursors, check_stream, stream
from tests.bed.tokenizer import chat
from tests.faults.forked import ApiProcess

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class Shape(StrEnum):
    """How a client asks."""

    STREAM = "stream"
    CHAT = "chat"
    TWO = "two choices"
    BODY = "in one piece"
    SHORT = "one token"
    LEAVES = "leaves in the middle"


class End(StrEnum):
    """How it came out."""

    WHOLE = "whole"
    LEFT = "left"  # by the client's own wish
    BROKEN = "broken"  # the connection ended before the answer did
    REFUSED = "refused"  # 503, before anything was said
    FAILED = "failed"  # an explicit error in place of the rest


class _Left(Exception):  # noqa: N818 - no error
    """The client has heard enough."""


class _Leaver(Stream):
    """Hears some frames and goes."""

    def take(self, frame: Frame) -> None:
        Stream.take(self, frame)
        if len(self.frames) > 5 and not self.done:
            raise _Left


@dataclass
class Ask:
    """One request and what its client heard."""

    shape: Shape
    prompt: tuple[int, ...]
    max_tokens: int
    api: ApiProcess
    heard: Stream
    end: End | None = None  # None: it goes on
    why: str = ""  # of a connection that broke

    @property
    def choices(self) -> int:
        return 2 if self.shape is Shape.TWO else 1

    @property
    def id(self) -> str:
        """The request, "" where the client never heard of it."""
        return self.heard.headers.get("x-request-id", "")

    @property
    def code(self) -> str:
        """The error that it ended with, or ""."""
        return str(self.heard.error["code"]) if self.heard.error else ""

    @property
    def path(self) -> str:
        return CHAT if self.shape is Shape.CHAT else COMPLETIONS

    @property
    def body(self) -> dict[str, Any]:
        prompt = {"messages": chat(self.prompt)} if self.shape is Shape.CHAT else {"prompt": list(self.prompt)}
        return {"model": "null", **prompt, "max_tokens": self.max_tokens, "n": self.choices}

    def check(self, divergent: bool, lossy: bool) -> int:
        """Everything heard is right, and a whole answer is complete; return the tokens checked."""
        if self.end is End.WHOLE and self.shape is not Shape.BODY:
            is_chat = self.shape is Shape.CHAT
            check_stream(
                self.heard, self.prompt, self.max_tokens,
                choices=self.choices, chat=is_chat, divergent=divergent, lossy=lossy,
            )  # fmt: skip
        else:
            for heard in self.heard.choices.values():
                check_chain(self.prompt, heard.ids, divergent=divergent)
        if self.end is End.WHOLE:
            assert [len(heard.ids) for heard in self.heard.choices.values()] == [self.max_tokens] * self.choices
        elif self.heard.frames and self.end is not End.FAILED:
            # check_cursors leaves out the last frame, which is [DONE] in a whole stream.
            check_cursors(Stream(frames=[*self.heard.frames, self.heard.frames[-1]]), self.choices, lossy=lossy)
        return sum(len(heard.ids) for heard in self.heard.choices.values())


@dataclass
class Traffic:
    """`width` clients, each of which asks again as soon as it has its answer, until `stop`.

    `pick` says which API process to ask, None while there is none. `asks` grows meanwhile.
    """

    pick: Callable[[int], ApiProcess | None]
    width: int = 6
    max_tokens: int = 60
    shapes: tuple[Shape, ...] = tuple(Shape)
    asks: list[Ask] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stopping = False
        self._numbers: Iterator[int] = itertools.count()
        self._pool = ThreadPoolExecutor(1)
        self._result = self._pool.submit(asyncio.run, self._run())

    def stop(self) -> None:
        """Ask no more; what is asked goes on to its end."""
        self._stopping = True

    @property
    def idle(self) -> bool:
        """Have all ended? Raise what went wrong in a client."""
        if not self._result.done():
            return False
        self._result.result()
        return True

    @property
    def open(self) -> list[Ask]:
        return [ask for ask in self.asks if ask.end is None]

    def close(self) -> None:
        self._stopping = True
        self._pool.shutdown()

    async def _run(self) -> None:
        # A connection for each request: one that is used again may just have been closed for its idleness.
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(verify=False, timeout=90, limits=limits) as client:
            await asyncio.gather(*(self._client(client) for _ in range(self.width)))

    async def _client(self, client: httpx.AsyncClient) -> None:
        while not self._stopping:
            n = next(self._numbers)
            api = self.pick(n)
            if api is None:
                await asyncio.sleep(0.02)
                continue
            ask = self._ask(n, api)
            self.asks.append(ask)
            ask.end = await _perform(client, ask)
            if ask.end in (End.REFUSED, End.BROKEN):
                await asyncio.sleep(0.1)  # as a client that is told to try again

    def _ask(self, n: int, api: ApiProcess) -> Ask:
        shape = self.shapes[n % len(self.shapes)]
        heard = _Leaver() if shape is Shape.LEAVES else Stream()
        tokens = 1 if shape is Shape.SHORT else self.max_tokens
        return Ask(shape, (n % 1000, n // 1000, 1, 2, 3, 4), tokens, api, heard)


async def _perform(client: httpx.AsyncClient, ask: Ask) -> End:
    try:
        if ask.shape is Shape.BODY:
            await _fetch(client, ask)
        else:
            await stream(client, ask.api.url + ask.path, ask.body, ask.heard)
    except _Left:
        return End.LEFT
    except httpx.TransportError as error:
        ask.why = repr(error)
        return End.BROKEN
    if ask.heard.status == 503:
        return End.REFUSED
    if ask.heard.error is not None:
        return End.FAILED
    return End.WHOLE if ask.heard.done else End.BROKEN


async def _fetch(client: httpx.AsyncClient, ask: Ask) -> None:
    """An answer in one piece, noted as a stream's is."""
    reply = await client.post(ask.api.url + ask.path, json=ask.body)
    ask.heard.status, ask.heard.headers = reply.status_code, dict(reply.headers)
    if reply.status_code != 200:
        ask.heard.error = reply.json()["error"]
        return
    body = reply.json()
    ask.heard.bodies.append(body)
    ask.heard.headers["x-request-id"] = body["id"]
    for choice in body["choices"]:
        assert choice["finish_reason"] == "length"
        ask.heard.choices[choice["index"]] = Heard(choice["index"], choice["text"])
    ask.heard.done = True
