"""Closed-loop load on a running server: N streams at once, fixed prompt and output lengths.

TTFT: request sent to first token received, queueing included. TPOT: (t_last - t_first) / (tokens - 1), per request.
A failed request counts as failed, it is not repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass

import httpx


@dataclass(frozen=True)
class Sample:
    """One request: seconds and tokens; `ok` is False when the stream ended in any other way than by length."""

    ok: bool
    ttft: float
    e2e: float
    tokens: int

    @property
    def tpot(self) -> float:
        return (self.e2e - self.ttft) / max(1, self.tokens - 1)


async def one(client: httpx.AsyncClient, model: str, prompt: list[int], output: int) -> Sample:
    """Stream one completion. Text chunks may carry several tokens, so tokens come from usage."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    first, last, tokens, finished = 0.0, 0.0, 0, False
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            now = time.perf_counter() - start
            if event.get("choices") and event["choices"][0]["text"]:
                first, last = first or now, now
            finished |= any(c["finish_reason"] == "length" for c in event.get("choices", ()))
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    return Sample(finished and tokens == output, first, last, tokens)


async def run(args: argparse.Namespace, streams: int) -> dict[str, object]:
    """Send `streams` requests at once, `--runs` times in a row."""
    rng = random.Random(args.seed)
    samples: list[Sample] = []
    walls: list[float] = []
    limits = httpx.Limits(max_connections=streams)
    async with httpx.AsyncClient(base_url=args.url, timeout=600, limits=limits) as client:
        model = args.model or (await client.get("/v1/models")).json()["data"][0]["id"]
        for _ in range(args.runs):
            prompts = [[rng.randrange(100, 30000) for _ in range(args.prompt)] for _ in range(streams)]
            start = time.perf_counter()
            samples += await asyncio.gather(*(one(client, model, prompt, args.output) for prompt in prompts))
            walls.append(time.perf_counter() - start)
    good = [s for s in samples if s.ok]
    return {
        "streams": streams,
        "requests": len(samples),
        "failed": len(samples) - len(good),
        "ttft_ms": quantiles([s.ttft for s in good]),
        "tpot_ms": quantiles([s.tpot for s in good]),
        "e2e_ms": quantiles([s.e2e for s in good]),
        "tokens_per_s": round(streams * args.output / statistics.median(walls), 1),
    }


def quantiles(seconds: list[float]) -> dict[str, float]:
    """p50, p90 and p99 in milliseconds."""
    ordered = sorted(seconds)
    return {f"p{q}": round(1000 * ordered[min(len(ordered) - 1, len(ordered) * q // 100)], 1) for q in (50, 90, 99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for streams in args.streams:
        print(json.dumps(asyncio.run(run(args, streams))), flush=True)


if __name__ == "__main__":
    main()
