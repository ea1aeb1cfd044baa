"""A whole site under attack: workers and API processes with their supervisor, and crowds of clients over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from prelay_worker.config import NullModel, Role
from tests.bed.chain import Stream, check_chain, check_stream, stream
from tests.bed.http import client_of, get
from tests.bed.processes import until
from tests.bed.servers import Server
from tests.faults import tally
from tests.faults.fleet import TIMES, ended
from tests.faults.forked import ApiProcess
from tests.faults.traffic import COMPLETIONS
from tests.faults.web import WebFleet

#: Tokens of a later attempt differ, so that a wrong resume cannot hide.
DIVERGENT = NullModel(step_ms=10, divergent=True)


def body(prompt: list[int], max_tokens: int = 100) -> dict[str, Any]:
    return {"model": "null", "prompt": prompt, "max_tokens": max_tokens}


class Crowd:
    """Clients that stream at the same time, in a thread of their own. Prompts differ from client to client."""

    def __init__(self, url: str, count: int = 8, max_tokens: int = 100, first: int = 0, divergent: bool = True) -> None:
        self.max_tokens = max_tokens
        self.divergent = divergent
        self.prompts = [[first + n, *range(5)] for n in range(count)]
        self.streams = [Stream() for _ in self.prompts]
        self._pool = ThreadPoolExecutor(1)
        self._result = self._pool.submit(asyncio.run, self._read(url))

    async def _read(self, url: str) -> list[BaseException | Stream]:
        async with client_of(url) as client:
            reading = (
                stream(client, COMPLETIONS, body(prompt, self.max_tokens), found)
                for prompt, found in zip(self.prompts, self.streams, strict=True)
            )
            return await asyncio.gather(*reading, return_exceptions=True)

    @property
    def done(self) -> bool:
        return self._result.done()

    @property
    def open(self) -> list[Stream]:
        """The streams that have begun and not ended."""
        return [found for found in self.streams if found.frames and not found.done]

    def until_streaming(self, count: int) -> None:
        """Wait until so many answers have begun and are far from their end."""

        def begun() -> bool:
            assert not self.done, "all has ended before"
            return sum(2 < len(found.frames) < 0.5 * self.max_tokens for found in self.streams) >= count

        until(begun, every_s=0.005)

    def outcomes(self, timeout_s: float = 60) -> list[BaseException | Stream]:
        """Wait for the end: what each client got, or the error that ended its connection."""
        return self._result.result(timeout_s)

    def check(self, timeout_s: float = 60) -> list[Stream]:
        """Every stream ended well, with the right tokens; return them."""
        outcomes = self.outcomes(timeout_s)
        for prompt, found in zip(self.prompts, outcomes, strict=True):
            if isinstance(found, BaseException):
                raise found
            check_stream(found, prompt, self.max_tokens, divergent=self.divergent)
        return self.streams

    def close(self) -> None:
        """The processes are gone: so are all connections."""
        self._pool.shutdown()

    def check_prefixes(self) -> None:
        """Whatever a client got is a right beginning of its answer, also where its connection broke."""
        for prompt, found in zip(self.prompts, self.streams, strict=True):
            for heard in found.choices.values():
                check_chain(prompt, heard.ids, divergent=self.divergent)


def restarted(found: Stream) -> bool:
    """Did the answer take more than one attempt?"""
    return not found.frames[-2].id.startswith("1-")


def first_after(found: Stream, moment: float) -> float:
    """Seconds from `moment` (monotonic) to the stream's next frame; 0 when it has ended before."""
    later = [frame.at for frame in found.frames if frame.at > moment]
    return later[0] - moment if later else 0.0


@dataclass
class Site(WebFleet):
    """A fleet with its supervisor whose clients are crowds. End with `check_nothing_left`."""

    crowds: list[Crowd] = field(default_factory=list)

    def serve(self, *roles: Role, blocks: int = 512, **changes: Any) -> None:
        """Start workers and wait until they are ready."""
        for role in roles:
            self.start(role, blocks=blocks, **changes)
        self.until_ready()

    def api(self, faults: str = "", **changes: Any) -> ApiProcess:
        """Start an API process, and wait until it has heard of workers that can serve."""
        api = self.start_api(faults, **changes)
        until(lambda: api.id and is_ready(api.url), 20)
        return api

    def crowd(self, api: ApiProcess, count: int = 8, max_tokens: int = 100, first: int = 0) -> Crowd:
        """Clients that begin now."""
        crowd = Crowd(api.url, count, max_tokens, first, self.null.divergent)
        self.crowds.append(crowd)
        return crowd

    def until_gone(self, timeout_s: float = 60) -> None:
        """Start the dead again, and continue the frozen, until all clients have their answers."""
        self.wait(lambda: all(crowd.done for crowd in self.crowds), timeout_s)

    def check_crowds(self, timeout_s: float = 60) -> list[Stream]:
        """Wait for all clients; every stream ended well and with the right tokens. Return them."""
        self.until_gone(timeout_s)
        streams = [found for crowd in self.crowds for found in crowd.check()]
        tally.add(tokens=sum(len(heard.ids) for found in streams for heard in found.choices.values()))
        return streams

    def check_one_end(self, job: str, tokens: int) -> list[int]:
        """The log of a job has so many tokens, and one end behind them; return the tokens."""
        log: Any = self.redis.xrange(self.keys.log(job))
        assert [b"f" in entry for _, entry in log] == [False] * tokens + [True], job
        return [int(entry[b"t"]) for _, entry in log[:-1]]

    def pids(self) -> list[int]:
        """Of all that should live on; fails where one has ended."""
        assert not [process for process in self.processes if process.code is not None], self.report()
        return [process.pid for process in self.processes]

    def report(self) -> str:
        streams = [found for crowd in self.crowds for found in crowd.streams]
        waiting = [(found.headers.get("x-request-id"), len(found.frames)) for found in streams if not found.done]
        return f"open: {waiting}\n{self.logs()}"

    def close(self) -> None:
        for process in self.processes:
            process.kill()  # so that every client's connection ends
        for crowd in self.crowds:
            crowd.close()
        super().close()


@contextlib.contextmanager
def site(server: Server, **options: Any) -> Iterator[Site]:
    """A site that leaves no process and no key. Counted as a case when it ends well. `options` are WebFleet's."""
    with tempfile.TemporaryDirectory(prefix="site-") as folder:
        found = Site(server, Path(folder), **{"null": DIVERGENT, "times": TIMES, **options})
        with ended(found):
            try:
                yield found
            except BaseException:
                print(found.report())
                raise
        tally.add(cases=1)


def is_ready(url: str) -> bool:
    """Would a request be served?"""
    try:
        return get(f"{url}/health/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
