"""`prelay bench pipeline`: what everything but the model costs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from ..errors import CliError
from . import facts, proc, target
from .output import Report, Sheet, Wanted, deliver
from .plot import Panel
from .progress import Tell, progress
from .rig import WORDS, Rig, null_service

#: Tokens of each answer before anything is measured.
_WARM_TOKENS = 16
#: How often the server's memory is looked at, seconds.
_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class Plan:
    """`streams` at once, one level for each number; `runs` rounds of each, and more until `hold_s` have passed."""

    streams: Sequence[int] = (64,)
    tokens: int = 512
    prompt: int = 128
    runs: int = 3
    step_ms: float = 0.0
    hold_s: float = 0.0
    model: Path | None = None
    words: dict[str, Any] = field(default_factory=dict)


def run(plan: Plan, wanted: Wanted, notes: Sequence[str]) -> int:
    """Measure and report. Return 0, or 130 when it was interrupted, with the levels that were complete.

    Raise CliError when the service does not start.
    """
    wanted.check()
    found = facts.begin(notes)
    levels: list[dict[str, Any]] = []
    about: dict[str, Any] = {"model": "null"}
    interrupted = False
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both leave in order
    try:
        with progress() as tell:
            tell("starting", 0, 0)
            with null_service(plan.model, plan.step_ms, max(plan.streams)) as rig:
                about |= target.describe(rig.url, "null")
                for streams in plan.streams:
                    levels.append(_Level(plan, rig, streams, tell).measure())  # noqa: PERF401 - kept when interrupted
    except KeyboardInterrupt:
        interrupted = True
    facts.finish(found)
    data: dict[str, Any] = {"bench": "pipeline", "facts": found, "server": about, "settings": plan.words}
    data |= {"levels": levels, "interrupted": interrupted}
    title = f"prelay bench pipeline: null model, {about.get('mode')}, {about.get('queue_server')}"
    deliver(Report(title, data, lambda: list(_sheets(data)), lambda: _panels(data)), wanted)
    return 130 if interrupted else 0


class _Level:
    """So many streams at once, measured."""

    def __init__(self, plan: Plan, rig: Rig, streams: int, tell: Tell) -> None:
        self.plan, self.rig, self.streams = plan, rig, streams
        self._tell = tell

    def measure(self) -> dict[str, Any]:
        asyncio.run(self._load(_WARM_TOKENS))
        live = asyncio.run(self._bytes_per_request())
        rates: list[float] = []
        costs: list[dict[str, float]] = []
        end = time.monotonic() + self.plan.hold_s
        while len(rates) < self.plan.runs or time.monotonic() < end:
            self._tell(f"{self.streams} streams", len(rates), self.plan.runs)
            before, start = self._cpu(), time.perf_counter()
            tokens = asyncio.run(self._load(self.plan.tokens))
            rates.append(tokens / (time.perf_counter() - start))
            costs.append({name: (at - before[name]) / tokens * 1e6 for name, at in self._cpu().items()})
        return {
            "streams": self.streams,
            "runs": len(rates),
            "tokens_per_s": round(statistics.median(rates), 1),
            "tokens_per_s_of_runs": [round(rate, 1) for rate in rates],
            "cpu_us_per_token": {name: round(statistics.median(c[name] for c in costs), 2) for name in costs[0]},
            "redis_bytes_per_live_request": live,
        }

    def _cpu(self) -> dict[str, float]:
        """CPU seconds of each process so far; "client" is this one."""
        try:
            found = {name: proc.cpu_s(pid) for name, pid in self.rig.pids.items()}
        except OSError:
            raise CliError("a process of the service has ended: nothing can be said of its CPU time") from None
        return found | {"client": proc.cpu_s(os.getpid())}

    async def _load(self, tokens: int) -> int:
        """Stream all answers at once and return how many tokens came."""
        return sum(await asyncio.gather(*(self._stream(number, tokens) for number in range(self.streams))))

    async def _stream(self, number: int, tokens: int) -> int:
        """One answer. The client does as little as can be: it reads to the end, where the usage stands."""
        host, port = self.rig.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(self._request(host, number, tokens))
            tail = b""
            while chunk := await reader.read(1 << 16):
                tail = (tail + chunk)[-2000:]
        except ConnectionError as error:
            raise CliError(f"the service broke a stream off: {error}") from None
        finally:
            writer.close()
        return counted(tail, tokens)

    def _request(self, host: str, number: int, tokens: int) -> bytes:
        prompt = [(number + i) % WORDS for i in range(self.plan.prompt)]
        asked = {"model": "null", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = json.dumps(asked | {"stream": True, "stream_options": {"include_usage": True}})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n"
        return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()

    async def _bytes_per_request(self) -> int:
        """The most that the server's memory grew by while requests are live, for each of them."""
        with redis.Redis(unix_socket_path=str(self.rig.socket), protocol=2) as client:
            before = _used(client)
            work, seen = asyncio.create_task(self._load(self.plan.tokens)), [0]
            while not work.done():
                await asyncio.sleep(_LOOK_S)
                seen.append(_used(client) - before)
            await work
            return max(seen) // self.streams


def counted(tail: bytes, tokens: int) -> int:
    """The tokens that the end of a stream says it had. Raise CliError unless it ended well with so many."""
    try:
        found = int(tail.rpartition(b'"completion_tokens":')[2].split(b",")[0])
    except ValueError:
        found = 0
    if b"[DONE]" not in tail or found != tokens:
        raise CliError(f"a stream ended with {found} of {tokens} tokens: {tail[-200:].decode(errors='replace')!r}")
    return found


def _used(client: redis.Redis) -> int:
    return int(client.info("memory")["used_memory"])


def _sheets(data: dict[str, Any]) -> Iterator[Sheet]:
    names = list(data["levels"][0]["cpu_us_per_token"]) if data["levels"] else []
    rows = [
        [level["streams"], level["tokens_per_s"], level["redis_bytes_per_live_request"]] for level in data["levels"]
    ]
    yield "", ["streams", "tokens/s", "Redis bytes per live request"], rows
    each = [(level["streams"], list(level["cpu_us_per_token"].values())) for level in data["levels"]]
    costs = [[streams, *values, sum(values)] for streams, values in each]
    yield "CPU time per token, microseconds", ["streams", *names, "sum"], costs


def _panels(data: dict[str, Any]) -> list[Panel]:
    levels = sorted(data["levels"], key=lambda level: int(level["streams"]))
    names = list(levels[0]["cpu_us_per_token"]) if levels else []

    def line(figure: Callable[[dict[str, Any]], float]) -> list[tuple[float, float]]:
        return [(level["streams"], figure(level)) for level in levels]

    def cost_of(name: str) -> Callable[[dict[str, Any]], float]:
        return lambda level: float(level["cpu_us_per_token"][name])

    rates = line(lambda level: float(level["tokens_per_s"]))
    costs = [(name, line(cost_of(name))) for name in names]
    return [
        Panel("throughput", "streams at once", "tokens a second", [("all", rates)], even=True),
        Panel("CPU time per token", "streams at once", "microseconds", costs, even=True),
    ]
