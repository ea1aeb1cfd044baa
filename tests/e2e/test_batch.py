"""A batch on the demo model, of which everything that runs it is killed once while it runs."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.bed.processes import until
from tests.bed.serving import Serving, serving

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

LINES, PROMPTS, TOKENS = 2_000, 50, 3
OVER = ("completed", "failed", "expired", "cancelled")


def body(number: int) -> dict[str, Any]:
    """One of fifty requests, greedy and seeded in turn."""
    which = number % PROMPTS
    chance = {"temperature": 0.9, "seed": which} if which % 2 else {"temperature": 0}
    prompt = f"The {which + 2} most important things about the sea are"
    return {"model": "demo", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, **chance}


def answer_to(server: Serving, asked: dict[str, Any]) -> str:
    """What a request of its own gets."""
    reply = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60).raise_for_status()
    return str(reply.json()["choices"][0]["text"])


def jsonl() -> bytes:
    rows = (
        {"custom_id": f"line {n}", "method": "POST", "url": "/v1/completions", "body": body(n)} for n in range(LINES)
    )
    return "\n".join(map(json.dumps, rows)).encode()


def batch_workers(server: Serving) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children()
    return [child for child in children if "batch-worker" in " ".join(child.cmdline())]


def busy(server: Serving) -> tuple[psutil.Process, psutil.Process]:
    """The batch worker that runs the batch, and its work horse."""

    def found() -> tuple[psutil.Process, psutil.Process] | None:
        for worker in batch_workers(server):
            for horse in worker.children():
                if "rq-scheduler" not in horse.name():
                    return worker, horse
        return None

    pair: tuple[psutil.Process, psutil.Process] = until(found, 60)
    return pair


def kill_redis(server: Serving) -> None:
    children = psutil.Process(server.process.pid).children()
    (redis,) = [child for child in children if child.name().startswith(("redis-server", "valkey-server"))]
    redis.send_signal(signal.SIGKILL)


def test_a_batch_is_complete_and_right_although_everything_that_runs_it_was_killed(demo_model: Path) -> None:
    """Its worker, its work horse, a decode worker and Redis, at a fifth, two fifths, … of 2,000 lines."""
    kills: Sequence[Callable[[Serving], object]] = (
        lambda server: busy(server)[0].kill(),
        lambda server: busy(server)[1].kill(),
        lambda server: server.kill("decode"),
        kill_redis,
    )
    with serving("--served-model-name", "demo", "--batch", "2", model=demo_model) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=10)
        expected = [answer_to(server, body(n)) for n in range(PROMPTS)]
        file = client.files.create(file=("lines.jsonl", jsonl()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h").id

        for n, kill in enumerate(kills, 1):
            until(lambda share=n / 5: _completed(client, batch) >= share * LINES, 300, every_s=0.2)  # type: ignore[misc]
            kill(server)
        killed_at = time.monotonic()
        until(lambda: client.batches.retrieve(batch).status in OVER, 300, every_s=0.2)
        print(f"over {time.monotonic() - killed_at:.0f} s after the last kill")

        found = client.batches.retrieve(batch)
        assert found.status == "completed", found
        assert found.error_file_id is None
        assert found.output_file_id is not None
        rows = [json.loads(row) for row in client.files.content(found.output_file_id).text.splitlines()]
        assert sorted(row["custom_id"] for row in rows) == sorted(f"line {n}" for n in range(LINES))
        for row in rows:
            number = int(row["custom_id"].removeprefix("line "))
            assert row["response"]["body"]["choices"][0]["text"] == expected[number % PROMPTS], row


def _completed(client: openai.OpenAI, batch: str) -> int:
    counts = client.batches.retrieve(batch).request_counts
    return counts.completed if counts else 0
