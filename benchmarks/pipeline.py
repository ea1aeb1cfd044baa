"""What the pipeline costs without a model: null workers, a real server, the API, streams over HTTP.

    python -m benchmarks.pipeline --streams 64 --tokens 512

Reports tokens/s, the CPU time that each process spent per token, and what a live request takes in Redis. Run it from
the repository's root: the processes are started as the tests start them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import redis

from prelay_worker.config import NullModel, Role
from tests.bed.processes import Fleet, fleet
from tests.bed.servers import Server, binary_of, running
from tests.bed.tokenizer import make_tokenizer

PROMPT = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64, help="requests at once")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each answer")
    parser.add_argument("--runs", type=int, default=3, help="rounds; the median counts")
    parser.add_argument("--step-ms", type=float, default=0, help="what a step of the null model takes")
    parser.add_argument("--hold", type=int, default=0, metavar="S", help="keep the load for S seconds (to profile it)")
    args = parser.parse_args()
    for server in running("redis" if binary_of("redis") else "valkey"):
        server.client.config_set("appendfsync", "everysec")  # as `prelay serve` starts it
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            print(json.dumps(measure(server, make_tokenizer(Path(folder)), args), indent=1))


def measure(server: Server, model: Path, args: argparse.Namespace) -> dict[str, object]:
    null = NullModel(step_ms=args.step_ms)
    with fleet(server.settings(), model) as found:
        api = found.api()
        for role in (Role.PREFILL, Role.DECODE):
            found.worker(role, null=null, blocks=65536, max_running=args.streams)
        asyncio.run(load(api.url, args.streams, 16))  # warm
        live = asyncio.run(bytes_per_request(server, api.url, args))
        rates: list[float] = []
        costs: list[dict[str, float]] = []
        end = time.monotonic() + args.hold
        while len(rates) < args.runs or time.monotonic() < end:
            before, start = dict(cpu(server, found)), time.perf_counter()
            tokens = asyncio.run(load(api.url, args.streams, args.tokens))
            rates.append(tokens / (time.perf_counter() - start))
            costs.append({name: (at - before[name]) / tokens * 1e6 for name, at in cpu(server, found)})
        return {
            "streams": args.streams,
            "tokens": args.tokens,
            "step_ms": args.step_ms,
            "tokens_per_s": round(statistics.median(rates)),
            "cpu_us_per_token": {name: round(statistics.median(c[name] for c in costs), 1) for name in costs[0]},
            "redis_bytes_per_live_request": live,
        }


def cpu(server: Server, found: Fleet) -> Iterator[tuple[str, float]]:
    """CPU seconds of each process so far."""
    pids = {"redis": server.pid, **{process.kind: process.pid for process in found.processes}}
    for name, pid in pids.items():
        times = psutil.Process(pid).cpu_times()
        yield name, times.user + times.system
    used = resource.getrusage(resource.RUSAGE_SELF)
    yield "client", used.ru_utime + used.ru_stime


async def load(url: str, streams: int, tokens: int) -> int:
    """Stream `streams` answers at once and return how many tokens came."""
    return sum(await asyncio.gather(*(stream(url, number, tokens) for number in range(streams))))


async def stream(url: str, number: int, tokens: int) -> int:
    """One answer. The client does as little as can be: it reads to the end, and the usage in the last frame counts."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(
        {
            "model": "null",
            "prompt": [(number + i) % 1000 for i in range(PROMPT)],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
    tail = b""
    while chunk := await reader.read(1 << 16):
        tail = (tail + chunk)[-2000:]
    writer.close()
    counted = int(tail.rpartition(b'"completion_tokens":')[2].split(b",")[0])
    assert b"[DONE]" in tail, tail
    assert counted == tokens, tail
    return counted


async def bytes_per_request(server: Server, url: str, args: argparse.Namespace) -> int:
    """Memory that Redis holds more while the requests are live, about half way, per request."""
    client: redis.Redis = server.client
    before = int(client.info("memory")["used_memory"])
    task = asyncio.create_task(load(url, args.streams, args.tokens))
    seen: list[int] = []
    while not task.done():
        await asyncio.sleep(0.02)
        seen.append(int(client.info("memory")["used_memory"]) - before)
    await task
    return int(max(seen) // args.streams)


if __name__ == "__main__":
    main()
