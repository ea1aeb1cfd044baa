"""What preemption and the split into two phases cost, on a real model, each against its undisturbed twin in one run.

    python -m benchmarks.preemption $(prelay model path) --only oversubscribed interference second_token

oversubscribed  the same requests at once, in a decode pool that holds them all and in one that holds half: total time,
                prompt tokens computed beyond the necessary, preempts of one job at most (aim: 1.15 times the time)
second_token    from the first to the second token of one stream, and from there to the third, prefill + decode against
                unified with as many threads for a step (aim: + 10 %)
interference    gaps between the tokens of running streams while a long prompt arrives, prefill + decode against unified
                (aim: p99 at most half)

Every server has two threads in all: one for each phase, or two for the unified worker (but in second_token one,
since only one step runs at a time). Runs take turns. Run from the
repository's root.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.bed.serving import AS_IT_IS, Serving, serving

DISAGGREGATED = ("--prefill", "1", "--decode", "1", "--threads", "1")
UNIFIED = ("--unified", "1", "--threads", "2")
BLOCK = 16


@dataclass
class Stream:
    """When the tokens of one stream came (seconds of the loop's clock), and its request id."""

    id: str = ""
    at: list[float] = field(default_factory=list)
    tokens: int = 0

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.at, self.at[1:], strict=False)]


async def stream(client: httpx.AsyncClient, prompt: list[int], tokens: int, found: Stream | None = None) -> Stream:
    found = found or Stream()
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            found.id = event["id"]
            if event["choices"] and event["choices"][0]["text"]:
                found.at.append(time.perf_counter())
            found.tokens = (event.get("usage") or {}).get("completion_tokens", found.tokens)
    assert found.tokens == tokens, found
    return found


def prompt_of(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(100, 30_000) for _ in range(tokens)]


@contextlib.contextmanager
def server(model: Path, *options: str) -> Iterator[Serving]:
    # Prompts that were computed before must be computed again.
    with serving(
        "--served-model-name", "m", "--prefix-cache", "off", *options, model=model, environment=AS_IT_IS
    ) as found:
        asyncio.run(warm(found))
        yield found


async def warm(found: Serving) -> None:
    async with httpx.AsyncClient(base_url=found.url, timeout=600) as client:
        await stream(client, prompt_of(random.Random(1), 32), 8)


# Oversubscription.

JOBS, PROMPT, ANSWER = 8, 32, 96


async def crowd(found: Serving, seed: int) -> dict[str, float]:
    rng = random.Random(seed)
    before = computed(found, "prefill")
    async with httpx.AsyncClient(base_url=found.url, timeout=600) as client:
        start = time.perf_counter()
        streams = await asyncio.gather(*(stream(client, prompt_of(rng, PROMPT), ANSWER) for _ in range(JOBS)))
        wall = time.perf_counter() - start
        jobs = [(await client.get(f"/admin/jobs/{one.id}")).json() for one in streams]
    await asyncio.sleep(3.5)  # a heartbeat says what was computed
    epochs = [choice["epoch"] for job in jobs for choice in job["choices"]]
    wasted = computed(found, "prefill") - before - JOBS * PROMPT
    return {"wall_s": wall, "computed_again": wasted, "most_preempts": max(epochs) - 1, "preempts": sum(epochs) - JOBS}


def computed(found: Serving, role: str) -> int:
    return sum(int(worker["computed_tokens"]) for worker in found.workers(role))


def oversubscribed(model: Path, runs: int) -> dict[str, Any]:
    whole = JOBS * (-(-(PROMPT + ANSWER) // BLOCK))
    pools = {"holds all": whole, "holds half": whole // 2}
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in pools}
    with contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(server(model, *DISAGGREGATED, "--kv-blocks", str(blocks)))
            for name, blocks in pools.items()
        }
        for run in range(runs):
            for name, found in servers.items():
                samples[name].append(asyncio.run(crowd(found, run)))
    medians = {name: {key: median([one[key] for one in all_]) for key in all_[0]} for name, all_ in samples.items()}
    ratio = median(
        [
            half["wall_s"] / all_["wall_s"]
            for all_, half in zip(samples["holds all"], samples["holds half"], strict=True)
        ]
    )
    return {**medians, "time_ratio": ratio}


# Two phases against one.


def both(
    model: Path, runs: int, measure: Callable[[Serving, int], list[float]], unified: tuple[str, ...] = UNIFIED
) -> dict[str, dict[str, float]]:
    """The seconds that `measure` finds on each kind of server, all runs together."""
    kinds = {"prefill + decode": DISAGGREGATED, "unified": unified}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(server(model, *options)) for name, options in kinds.items()}
        for run in range(runs):
            for name, found in servers.items():
                seconds[name] += measure(found, run)
    return {name: quantiles(values) for name, values in seconds.items()}


def second_token(model: Path, runs: int) -> dict[str, Any]:
    later: list[float] = []  # of both kinds: a step alone

    def measure(found: Serving, run: int) -> list[float]:
        async def some() -> list[Stream]:
            async with httpx.AsyncClient(base_url=found.url, timeout=600) as client:
                rng = random.Random(run)
                return [await stream(client, prompt_of(rng, 128), 6) for _ in range(10)]

        streams = asyncio.run(some())
        later.extend(gap for each in streams for gap in each.gaps[1:])
        return [each.gaps[0] for each in streams]

    found = both(model, runs, measure, ("--unified", "1", "--threads", "1"))
    return {**found, "later": quantiles(later)}


RUNNING, LONG = 4, 4_096


def interference(model: Path, runs: int) -> dict[str, Any]:
    return both(model, runs, lambda found, run: asyncio.run(disturbed(found, run)))


async def disturbed(found: Serving, run: int) -> list[float]:
    """Gaps of streams that run while a long prompt is computed, from its sending to its first token."""
    rng = random.Random(run)
    async with httpx.AsyncClient(base_url=found.url, timeout=900) as client:
        running = [Stream() for _ in range(RUNNING)]
        tasks = [asyncio.create_task(stream(client, prompt_of(rng, 32), 2_000, each)) for each in running]
        while any(len(each.at) < 10 for each in running):  # noqa: ASYNC110 - lists have no event
            await asyncio.sleep(0.05)
        start = time.perf_counter()
        await stream(client, prompt_of(rng, LONG), 1)
        end = time.perf_counter()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    gaps = [
        later - earlier
        for each in running
        for earlier, later in zip(each.at, each.at[1:], strict=False)
        if start < later and earlier < end
    ]
    assert gaps, "no token came meanwhile"
    return gaps


def median(values: list[float]) -> float:
    return round(statistics.median(values), 3)


def quantiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    found = {f"p{q}_ms": round(1000 * ordered[min(len(ordered) - 1, len(ordered) * q // 100)], 1) for q in (50, 90, 99)}
    return {"count": len(ordered), **found}


MEASURES = {"oversubscribed": oversubscribed, "second_token": second_token, "interference": interference}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    for name in args.only:
        print(json.dumps({name: MEASURES[name](args.model, args.runs)}), flush=True)


if __name__ == "__main__":
    main()
