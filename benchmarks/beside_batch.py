"""What a batch costs the requests beside it, and what the batch gets: a real model, `prelay serve`.

    python -m benchmarks.beside_batch $(prelay model path) --runs 3

quiet    one client asks again and again (closed loop, each prompt new), nothing else runs: time to the first token, and
         between those of an answer
beside   the same while a batch of more lines than can end has the rest; its tokens/s meanwhile
alone    the batch with nothing beside it: its tokens/s
cache    a batch whose lines begin with the same long text, in the file in turn with others, against the same lines
         without that text in common: prompt tokens that the prefix cache had

The phases take turns. Run from the repository's root.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.bed.processes import until
from tests.bed.serving import AS_IT_IS, Serving, serving

#: Tokens of an online prompt, of its answer, and of a line's.
PROMPT, ANSWER, LINE_PROMPT, LINE_ANSWER = 128, 16, 48, 32
#: Lines of a batch that is to outlast a phase.
MANY = 2_000
OVER = ("completed", "failed", "expired", "cancelled")


def ids(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(1000, 30_000) for _ in range(count)]


def line(number: int, prompt: list[int], tokens: int) -> str:
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body})


class Client:
    """What one does with a running server."""

    def __init__(self, found: Serving) -> None:
        self._http = httpx.Client(base_url=found.url, timeout=600)
        self._chance = random.Random(1)

    def ask(self) -> tuple[float, float]:
        """Seconds to the first token of a new prompt, and between the tokens of its answer."""
        body = {"model": "m", "prompt": ids(self._chance, PROMPT), "max_tokens": ANSWER, "ignore_eos": True}
        begun = time.perf_counter()
        with self._http.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
            lines = (text for text in reply.iter_lines() if text.startswith("data: {"))
            times = [time.perf_counter() - begun for _ in lines]
        return times[0], (times[-1] - times[0]) / (ANSWER - 1)

    def begin(self, lines: list[str]) -> str:
        """Begin a batch of these lines: its id."""
        file = {"file": ("lines.jsonl", "\n".join(lines).encode())}
        stored = self._http.post("/v1/files", data={"purpose": "batch"}, files=file).raise_for_status().json()
        body = {"input_file_id": stored["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        return str(self._http.post("/v1/batches", json=body).raise_for_status().json()["id"])

    def state(self, batch: str) -> dict[str, Any]:
        return dict(self._http.get(f"/v1/batches/{batch}").raise_for_status().json())

    def done(self, batch: str) -> int:
        return int(self.state(batch)["request_counts"]["completed"])

    def until_over(self, batch: str) -> dict[str, Any]:
        until(lambda: self.state(batch)["status"] in OVER, 900, every_s=0.2)
        return self.state(batch)

    @contextmanager
    def batch(self) -> Iterator[str]:
        """A batch that has every slot, until the block ends."""
        many = [line(number, ids(self._chance, LINE_PROMPT), LINE_ANSWER) for number in range(MANY)]
        batch = self.begin(many)
        until(lambda: self.done(batch) > 0, 300, every_s=0.2)
        yield batch
        self._http.post(f"/v1/batches/{batch}/cancel").raise_for_status()
        self.until_over(batch)

    def outputs(self, batch: str) -> list[dict[str, Any]]:
        file = self.state(batch)["output_file_id"]
        return [json.loads(text) for text in self._http.get(f"/v1/files/{file}/content").text.splitlines()]


def p(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)


def fairness(client: Client, runs: int, requests: int) -> dict[str, Any]:
    found: dict[str, list[tuple[float, float]]] = {"quiet": [], "beside": []}
    rates: dict[str, list[float]] = {"beside": [], "alone": []}
    for _ in range(runs):
        found["quiet"] += [client.ask() for _ in range(requests)]
        with client.batch() as batch:
            before, begun = client.done(batch), time.perf_counter()
            found["beside"] += [client.ask() for _ in range(requests)]
            middle, halfway = client.done(batch), time.perf_counter()
            rates["beside"].append((middle - before) * LINE_ANSWER / (halfway - begun))
            time.sleep(halfway - begun)
            rates["alone"].append((client.done(batch) - middle) * LINE_ANSWER / (time.perf_counter() - halfway))
    ttft = {name: [first for first, _ in all_] for name, all_ in found.items()}
    tpot = {name: [each for _, each in all_] for name, all_ in found.items()}
    return {
        "ttft": {name: {"p50_ms": p(all_, 0.5), "p95_ms": p(all_, 0.95)} for name, all_ in ttft.items()},
        "tpot": {name: {"p50_ms": p(all_, 0.5), "p95_ms": p(all_, 0.95)} for name, all_ in tpot.items()},
        "ratios": {f"p{q}": round(p(ttft["beside"], q / 100) / p(ttft["quiet"], q / 100), 2) for q in (50, 95)},
        "batch_tokens_per_s": {name: round(statistics.median(all_), 1) for name, all_ in rates.items()},
    }


def cache(client: Client) -> dict[str, Any]:
    """Four groups of lines, in the file in turn; in `shared` those of a group begin with the same 64 tokens."""
    chance, report = random.Random(7), {}
    groups = [ids(chance, 64) for _ in range(4)]
    for name in ("shared", "apart"):
        lines = []
        for number in range(120):
            start = groups[number % 4] if name == "shared" else ids(chance, 64)
            lines.append(line(number, start + ids(chance, 8), 4))
        begun = time.perf_counter()
        batch = client.begin(lines)
        client.until_over(batch)
        usages = [each["response"]["body"]["usage"] for each in client.outputs(batch)]
        cached = [(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0) for usage in usages]
        report[name] = {
            "wall_s": round(time.perf_counter() - begun, 1),
            "prompt_tokens": sum(usage["prompt_tokens"] for usage in usages),
            "cached_tokens": sum(cached),
        }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--requests", type=int, default=20, help="of the one client, in each phase")
    parser.add_argument("--only", choices=("fairness", "cache"))
    args = parser.parse_args()
    options = ("--served-model-name", "m", "--prefill", "1", "--decode", "1", "--batch", "1")
    with serving(*options, model=args.model, environment=AS_IT_IS) as found:
        client = Client(found)
        client.ask()
        if args.only != "cache":
            print(json.dumps({"fairness": fairness(client, args.runs, args.requests)}), flush=True)
        if args.only != "fairness":
            print(json.dumps({"cache": cache(client)}), flush=True)


if __name__ == "__main__":
    main()
