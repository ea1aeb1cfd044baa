"""What clients cost one API process, with null workers: many streams, and streams that go on elsewhere.

    python -m benchmarks.clients --idle 1000 --active 300

latency  time from one token of an active stream to its next at the client, less what a step takes: p50 and p99, alone
         and beside idle streams (whose requests wait for a worker and hear comments); memory (RSS) of the API process
         and its connections to Redis
resume   from the loss of the API process that a stream came from to the next token at the client, through another
         (prelay.client's way): p50 and max

Run from the repository's root.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from prelay_queue.settings import QueueTimes
from prelay_worker.config import NullModel, Role
from tests.bed.http import client_of
from tests.bed.lines import lines, named, watched
from tests.bed.parts import Part, get_part, post_part
from tests.bed.processes import Api, Fleet, Process, fleet, until, until_ready
from tests.bed.servers import Server, running
from tests.bed.tokenizer import make_tokenizer

COMPLETIONS = "/v1/completions"
STEP_MS = 100.0
TOKENS = 60


@dataclass
class Gaps:
    """When the frames of one stream came. `open`: the server has begun to answer."""

    open: bool = False
    at: list[float] = field(default_factory=list)

    def late_ms(self) -> list[float]:
        """How much later than a step each token came after the one before; early is 0."""
        gaps = (1000 * (b - a) for a, b in zip(self.at, self.at[1:], strict=False))
        return [max(0.0, gap - STEP_MS) for gap in gaps]


def body(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {"model": "null", "prompt": prompt, "max_tokens": TOKENS, **more}


async def read(client: httpx.AsyncClient, asked: dict[str, Any], gaps: Gaps) -> None:
    async with client.stream("POST", COMPLETIONS, json={**asked, "stream": True}) as response:
        gaps.open = True
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                gaps.at.append(time.monotonic())


async def all_open(found: list[Gaps]) -> None:
    await asyncio.to_thread(until, lambda: all(gaps.open for gaps in found), 120)


async def active(api: Api, prefill: Process, count: int) -> list[float]:
    """Urgent streams: begun while the prefill worker is stopped, so that they come before all that waits already."""
    async with client_of(api.url) as client:
        found = [Gaps() for _ in range(count)]
        asked = [read(client, body([n, 1], priority="interactive"), gaps) for n, gaps in enumerate(found)]
        reading = asyncio.gather(*asked)
        await all_open(found)
        prefill.send(signal.SIGCONT)
        await reading
    return sorted(late for gaps in found for late in gaps.late_ms())


async def idle(api: Api, count: int, ready: asyncio.Event, over: asyncio.Event) -> None:
    """Streams that wait, and hear comments."""
    async with client_of(api.url) as client:
        found = [Gaps() for _ in range(count)]
        asked = [
            asyncio.create_task(read(client, body([n % 1000, n // 1000 + 2], priority="batch"), gaps))
            for n, gaps in enumerate(found)
        ]
        await all_open(found)
        ready.set()
        await over.wait()
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


def facts(server: Server, api: Api) -> dict[str, float]:
    rss = psutil.Process(api.pid).memory_info().rss
    return {"rss_mib": round(rss / 2**20, 1), "redis_connections": lines(server, "api")}


def quantile(values: list[float], share: float) -> float:
    return round(values[min(len(values) - 1, int(share * len(values)))], 1)


async def latency(server: Server, api: Api, prefill: Process, idle_count: int, active_count: int) -> dict[str, Any]:
    ready, over = asyncio.Event(), asyncio.Event()
    prefill.send(signal.SIGSTOP)
    waiting = asyncio.create_task(idle(api, idle_count, ready, over)) if idle_count else None
    if waiting:
        await ready.wait()
    with watched(server, "api") as most:
        late = await active(api, prefill, active_count)
    found = {"late_p50_ms": quantile(late, 0.5), "late_p99_ms": quantile(late, 0.99), **facts(server, api)}
    over.set()
    if waiting:
        await waiting
    return {"idle": idle_count, "active": active_count, "tokens": len(late), **found, "redis_most": most.seen}


async def resume_once(found: Fleet, other: Api, n: int) -> float:
    dying = found.api()
    until_ready(dying.url)
    begun = Part()
    async with client_of(dying.url) as first, client_of(other.url) as second:
        asking = asyncio.create_task(post_part(first, COMPLETIONS, body([n, 3], max_tokens=400), found=begun))
        await asyncio.to_thread(until, lambda: len(begun.frames) > 8)
        lost = time.monotonic()
        dying.send(signal.SIGKILL)
        await asking
        rest = await get_part(second, begun.id, begun.last_id, most=1)
    found.processes.remove(dying)
    dying.close()
    return 1000 * (rest.frames[0].at - lost)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle", type=int, default=1000)
    parser.add_argument("--active", type=int, default=300)
    parser.add_argument("--resumes", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_tokenizer(Path(folder) / "model")
        for server in running("redis"):
            with fleet(server.settings(times=QueueTimes()), model) as found:
                api = found.api(queue=named(found.queue, "api"))
                null = NullModel(step_ms=STEP_MS)
                prefill = found.worker(Role.PREFILL, null=null, blocks=65536)
                found.worker(Role.DECODE, null=null, blocks=65536, max_running=args.active)
                until_ready(api.url)
                print(json.dumps({"empty": facts(server, api)}))
                for count in (0, args.idle):
                    told = asyncio.run(latency(server, api, prefill, count, args.active))
                    print(json.dumps(told), flush=True)
                times = [asyncio.run(resume_once(found, api, n)) for n in range(args.resumes)]
                resumed = {"p50_ms": round(statistics.median(times), 1), "max_ms": round(max(times), 1)}
                print(json.dumps({"resume": {"count": len(times), **resumed}}))
            break


if __name__ == "__main__":
    main()
