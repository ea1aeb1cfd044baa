"""The metrics and the logs of a whole `prelay serve`, whose workers are killed and whose answers are preempted."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from prelay_queue.metric_table import TABLE, Kind
from tests.bed.http import get, post
from tests.integration.serve_process import Serve, until
from tests.integration.test_metrics import Samples, samples, total

KEY = "sk-sesame-4711"
HEADERS = {"authorization": f"Bearer {KEY}"}
#: Words of prompts that are found nowhere else.
WORDS = ("pomegranate", "zeppelin")


@pytest.fixture(scope="module")
def serve(null_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Two API processes, which share what they show, and a key."""
    state = tmp_path_factory.mktemp("metrics") / "state"
    null = ("--null-model", "--model", str(null_folder), "--served-model-name", "null", "--null-step-ms", "4")
    forms = ("--log-format", "json", "--log-level", "debug", "--api", "2", "--batch", "0")
    found = Serve(*null, *forms, state=state, PRELAY_API_KEY=KEY)
    try:
        found.wait_for('"ready on http')
        found.children()
        yield found
        assert found.stop() == 0
        assert list((state / "metrics").iterdir()) == []
    finally:
        found.close()


def shown(serve: Serve) -> Samples:
    return samples(serve.url, **HEADERS)


def ask(serve: Serve, **more: Any) -> dict[str, Any]:
    body = {"model": "null", "prompt": " ".join(WORDS), "max_tokens": 5, **more}
    answer = post(f"{serve.url}/v1/completions", json=body, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def worker(serve: Serve, role: str) -> dict[str, Any]:
    listed = get(f"{serve.url}/admin/workers", headers=HEADERS).json()["workers"]
    return next(each for each in listed if each["role"] == role and not each["stale"])


def preempt_one(serve: Serve) -> str:
    """Have an answer preempted while it is decoded; return its request's id."""
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask, serve, max_tokens=400)
        until(lambda: worker(serve, "decode")["running"], "an answer is decoded")
        (job,) = get(f"{serve.url}/admin/jobs", headers=HEADERS).json()["jobs"]
        request_id = str(job["id"]).partition("/")[0]
        assert post(f"{serve.url}/admin/jobs/{request_id}/preempt", headers=HEADERS).status_code == 202
        assert asking.result(60)["usage"]["completion_tokens"] == 400
    return request_id


def counters(found: Samples) -> dict[Any, float]:
    """All that may only grow."""
    growing = {metric.name for metric in TABLE.values() if metric.kind is Kind.COUNTER}
    growing |= {f"{m.name}_{end}" for m in TABLE.values() if m.buckets for end in ("count", "sum", "bucket")}
    return {key: value for key, value in found.items() if key[0] in growing}


def test_nothing_goes_back_when_workers_are_killed_and_both_api_processes_say_the_same(serve: Serve) -> None:
    ask(serve)
    before = counters(shown(serve))
    assert total(shown(serve), "prelay_requests_total", outcome="length") == 1
    for role in ("prefill", "decode", "prefill"):
        pid = worker(serve, role)["pid"]
        serve.children()[role].send_signal(signal.SIGKILL)
        until(lambda role=role, pid=pid: _new(serve, role, pid), f"another {role} worker")  # type: ignore[misc]
        ask(serve)
        for found in [shown(serve) for _ in range(8)]:  # each on a connection of its own, to whichever process
            now = counters(found)
            assert {key: (old, now.get(key)) for key, old in before.items() if now.get(key, -1) < old} == {}
            before = now
            assert total(found, "prelay_build_info") == 1
    found = shown(serve)
    assert total(found, "prelay_restarts_total", role="prefill") == 2
    assert total(found, "prelay_restarts_total", role="decode") == 1
    assert total(found, "prelay_requests_total", outcome="length") == 4
    assert total(found, "prelay_request_prefill_time_seconds_count") == 4


def _new(serve: Serve, role: str, pid: int) -> bool:
    listed = get(f"{serve.url}/admin/workers", headers=HEADERS).json()["workers"]
    return any(each["role"] == role and not each["stale"] and each["pid"] != pid for each in listed)


def test_every_line_of_the_log_is_an_object_and_tells_request_epoch_and_worker(serve: Serve) -> None:
    request_id = preempt_one(serve)
    lines = [json.loads(line) for line in serve.log.splitlines()]
    assert all({"time", "level", "message", "process"} <= set(line) for line in lines)
    (preempted,) = (line for line in lines if line.get("request") == request_id and "preempted" in line["message"])
    assert (preempted["epoch"], preempted["job"]) == (1, f"{request_id}/0")
    assert preempted["process"].startswith("api")
    ready = [line for line in lines if line["message"].endswith("is ready")]
    assert {line["worker"] in line["message"] for line in ready} == {True}
    assert {line["process"] for line in ready} == {"prefill-0", "decode-0"}


def test_no_log_has_a_prompt_an_answer_or_a_key(serve: Serve) -> None:
    answer = ask(serve)["choices"][0]["text"]
    assert len(answer) > 10
    post(f"{serve.url}/v1/completions", json={"model": "null", "prompt": WORDS[0], "stop": 5}, headers=HEADERS)
    post(f"{serve.url}/v1/completions", content=f'{{"prompt": "{WORDS[1]}"', headers=HEADERS)
    get(f"{serve.url}/v1/models?key={KEY}", headers={"authorization": f"Bearer {KEY}x"})
    written = [serve.log, *(path.read_text(errors="replace") for path in serve.state.rglob("*.log"))]
    assert "is ready" in written[0]
    for text in written:
        assert not [word for word in (*WORDS, answer, KEY) if word in text]
