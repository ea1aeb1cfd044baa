"""What /metrics shows of a fleet that really runs, and is preempted, killed and cut off."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from prelay_queue import __version__
from prelay_queue.batches import BatchProgress, BatchScripts, BatchStatus
from prelay_queue.client import SyncQueue
from prelay_queue.metric_table import TABLE, Kind, Part
from prelay_worker.config import NullModel, Role, WorkerConfig
from tests.bed.batch import Batches, jsonl, lines
from tests.bed.chain import Listener, check_stream
from tests.bed.http import get, post
from tests.bed.ports import free_port
from tests.bed.processes import Fleet, Process, again_and_again, fleet, until, until_ready
from tests.bed.servers import Server

COMPLETIONS = "/v1/completions"

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(url: str, **headers: str) -> Samples:
    """All samples at a URL, by name and labels."""
    reply = get(f"{url}/metrics", headers=headers)
    assert reply.status_code == 200, reply.text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }


def total(found: Samples, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels."""
    return sum(value for (n, of), value in found.items() if n == name and set(labels.items()) <= of)


def body(**more: Any) -> dict[str, Any]:
    return {"model": "null", "prompt": [1, 2], "max_tokens": 50, **more}


@pytest.fixture(scope="module")
def shown(shared_server: Server, null_folder: Path) -> Iterator[tuple[str, ...]]:
    """Where an API process, a prefill and a decode worker show their metrics; one answer of theirs was preempted."""
    with fleet(shared_server.settings(), null_folder) as found:
        api = found.api()
        ports = {role: free_port() for role in (Role.PREFILL, Role.DECODE)}
        for role, port in ports.items():
            found.worker(role, null=NullModel(step_ms=4), metrics_port=port)
        until_ready(api.url)
        preempted(api.url)
        yield api.url, *(f"http://127.0.0.1:{port}" for port in ports.values())


def preempted(url: str) -> None:
    """Have an answer of 100 tokens that is preempted on its way."""
    listener = Listener(url, COMPLETIONS, body(max_tokens=100))
    until(lambda: len(listener.ids) > 10)
    assert post(f"{url}/admin/jobs/{listener.found.id}/preempt").status_code == 202
    check_stream(listener.end(), [1, 2], 100)


def test_every_metric_is_there_after_a_run_with_a_preempt(shown: tuple[str, ...]) -> None:
    names = {name for url in shown for name, _ in samples(url)}
    wanted = {
        f"{metric.name}_bucket" if metric.kind is Kind.HISTOGRAM else metric.name
        for metric in TABLE.values()
        if metric.part is not Part.SUPERVISOR
    }
    assert wanted <= names
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in names} <= set(TABLE)


def test_the_api_times_what_its_client_got(shown: tuple[str, ...]) -> None:
    found = samples(shown[0])
    for name in ("time_to_first_token", "time_per_output_token", "e2e_request_latency"):
        assert total(found, f"prelay_{name}_seconds_count", **{"class": "normal"}) == 1
    # Tokens that came together are one arrival: a busy machine has fewer. All the time between them is counted once.
    assert 1 < total(found, "prelay_inter_token_latency_seconds_count") < 100
    first, between, pace, whole = (
        total(found, f"prelay_{name}_seconds_sum")
        for name in ("time_to_first_token", "inter_token_latency", "time_per_output_token", "e2e_request_latency")
    )
    assert between == pytest.approx(99 * pace)
    assert 0.99 * 100 * 0.004 < first + between < whole
    assert total(found, "prelay_requests_total") == total(found, "prelay_requests_total", outcome="length") == 1
    assert total(found, "prelay_requeues_total") == 1
    assert total(found, "prelay_open_requests") == 0


def test_the_workers_time_the_five_stages_of_each_attempt(shown: tuple[str, ...]) -> None:
    _, prefill, decode = (samples(url) for url in shown)

    def times(found: Samples, stage: str) -> float:
        return total(found, f"prelay_request_{stage}_time_seconds_count", **{"class": "normal"})

    assert [times(prefill, stage) for stage in ("queue", "prefill")] == [2, 2]
    assert [times(decode, stage) for stage in ("decode_queue", "handover", "decode")] == [2, 2, 1]
    assert total(decode, "prelay_preemptions_total", cause="admin") == 1
    assert total(prefill, "prelay_prompt_tokens_total") == 2
    assert total(prefill, "prelay_wasted_tokens_total", reason="recomputed") > 10
    sampled = total(prefill, "prelay_generation_tokens_total") + total(decode, "prelay_generation_tokens_total")
    assert sampled == 100 + total(samples(shown[0]), "prelay_wasted_tokens_total", reason="discarded")


def test_what_stands_in_redis_is_shown_by_the_api(shown: tuple[str, ...]) -> None:
    def now() -> Samples:
        return samples(shown[0])

    until(lambda: total(now(), "prelay_kv_blocks", state="free") == 8192)
    found = now()
    assert total(found, "prelay_redis_up") == 1
    assert total(found, "prelay_workers", state="ready") == 2
    assert total(found, "prelay_kv_blocks_limit") == 8192
    assert total(found, "prelay_kv_blocks", state="orphaned") == 0
    assert total(found, "prelay_queue_depth") == total(found, "prelay_jobs") == 0
    assert total(found, "prelay_build_info", version=__version__) == 1


def test_what_is_refused_is_counted_too(shown: tuple[str, ...]) -> None:
    assert post(shown[0] + COMPLETIONS, json=body(max_tokens=-1)).status_code == 400
    assert get(f"{shown[0]}/v1/nothing").status_code == 404
    assert total(samples(shown[0]), "prelay_requests_total", outcome="invalid", **{"class": "none"}) == 1


def test_jobs_that_wait_are_shown_with_their_class_and_age(new_fleet: Fleet) -> None:
    api = new_fleet.api()
    listeners = [Listener(api.url, COMPLETIONS, body(priority=cls)) for cls in ("batch", "batch", "interactive")]
    waiting = {"class": "batch", "stage": "prefill"}
    until(lambda: total(samples(api.url), "prelay_queue_oldest_age_seconds", **waiting) > 0)
    until(lambda: total(samples(api.url), "prelay_open_requests") == 3)
    found = samples(api.url)
    assert total(found, "prelay_queue_depth", **waiting) == 2
    assert total(found, "prelay_queue_tokens", **{"class": "batch"}) == 4
    assert total(found, "prelay_jobs", state="queued") == 3
    new_fleet.worker(Role.UNIFIED)
    for listener in listeners:
        check_stream(listener.end(), [1, 2], 50)


def test_open_batches_are_shown_with_their_lines(new_fleet: Fleet) -> None:
    api = new_fleet.api()
    queue = SyncQueue(new_fleet.queue)
    batches = BatchScripts(queue.keys)
    for name, done in (("batch_1", 3), ("batch_2", 4)):
        queue.run(batches.open(name, b"{}", 60_000))
        epoch = queue.run(batches.take(name, "me", 60_000)).epoch
        progress = BatchProgress(total=10, completed=done, failed=1)
        queue.run(batches.keep(name, epoch, "me", 60_000, BatchStatus.IN_PROGRESS, progress))
    queue.close()
    found = samples(api.url)
    assert total(found, "prelay_batches_open") == 2
    states = TABLE["prelay_batch_lines"].labels["state"]
    lines = {state: total(found, "prelay_batch_lines", state=state) for state in states}
    assert lines == {"total": 20, "completed": 7, "failed": 2, "outstanding": 11}
    assert [total(found, "prelay_batches", state=state) for state in ("running", "waiting")] == [2, 0]


def test_a_batch_that_nobody_holds_waits(new_fleet: Fleet) -> None:
    api = new_fleet.api()
    queue = SyncQueue(new_fleet.queue)
    batches = BatchScripts(queue.keys)
    for name in ("batch_1", "batch_2"):
        queue.run(batches.open(name, b"{}", 60_000))
    epoch = queue.run(batches.take("batch_1", "me", 60_000)).epoch
    found = samples(api.url)
    assert [total(found, "prelay_batches", state=state) for state in ("running", "waiting")] == [1, 1]
    queue.run(batches.keep("batch_1", epoch, "me", 0, BatchStatus.IN_PROGRESS, BatchProgress(total=3)))
    queue.close()
    found = samples(api.url)
    assert [total(found, "prelay_batches", state=state) for state in ("running", "waiting")] == [0, 2]
    assert total(found, "prelay_batch_lines", state="outstanding") == 3


def test_a_redis_that_is_away_is_a_figure_too(own_server: Server, null_folder: Path) -> None:
    with fleet(own_server.settings(), null_folder) as found:
        api = found.api()
        assert total(samples(api.url), "prelay_redis_up") == 1
        own_server.kill()
        gone = samples(api.url)
        assert gone["prelay_redis_up", frozenset()] == 0
        assert ("prelay_open_requests", frozenset()) in gone
        assert ("prelay_dead_letters", frozenset()) not in gone
        assert post(api.url + COMPLETIONS, json=body()).status_code == 503
        assert total(samples(api.url), "prelay_requests_total", outcome="unavailable") == 1
        own_server.start()


def test_where_there_are_keys_metrics_want_one(shared_server: Server, null_folder: Path) -> None:
    with fleet(shared_server.settings(), null_folder) as found:
        api = found.api(api_keys=("sk-4711",))
        assert get(f"{api.url}/metrics").status_code == 401
        assert total(samples(api.url, authorization="Bearer sk-4711"), "prelay_redis_up") == 1


def ready(url: str) -> list[str]:
    """Why it is not ready; empty when it is, and the status agrees."""
    reply = get(f"{url}/health/ready")
    reasons: list[str] = reply.json()["reasons"]
    assert reply.status_code == (503 if reasons else 200)
    return reasons


def test_workers_and_batch_workers_say_whether_they_are_ready(
    own_server: Server, null_folder: Path, tmp_path: Path
) -> None:
    with fleet(own_server.settings(), null_folder) as found:
        ports = free_port(), free_port()
        worker, batch = (f"http://127.0.0.1:{port}" for port in ports)
        found.worker(Role.UNIFIED, metrics_port=ports[0])
        found.batch_worker(tmp_path, metrics_port=ports[1])
        until(lambda: not ready(worker) and not ready(batch))
        assert total(samples(batch), "prelay_redis_errors_total") == 0
        own_server.kill()
        until(lambda: any("Redis has not answered for" in reason for reason in ready(worker)))
        until(lambda: any("Redis does not answer" in reason for reason in ready(batch)))
        own_server.start()
        until(lambda: not ready(worker) and not ready(batch))


def test_batches_run_beside_constant_health_checks(shared_server: Server, null_folder: Path, tmp_path: Path) -> None:
    settings = shared_server.settings()
    asked = lines(3)
    with fleet(settings, null_folder) as found:
        found.worker(Role.UNIFIED)
        port = free_port()
        found.batch_worker(tmp_path, metrics_port=port)
        batches = Batches(settings, tmp_path)
        with again_and_again(0, lambda: ready(f"http://127.0.0.1:{port}")):
            for _ in range(5):  # each in a fork of its own
                batch = batches.create(jsonl(asked))
                assert batches.until_over(batch).status == "completed"
                batches.check(batch, asked)
        batches.close()


def test_a_taken_metrics_port_is_one_line_and_exit_code_one(new_fleet: Fleet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = WorkerConfig(Role.DECODE, new_fleet.queue, None, 64, null=NullModel(), metrics_port=port)
        process = Process(Role.DECODE, replace(config, model=new_fleet.model))
        new_fleet.processes.append(process)
        assert process.wait() == 1
    assert (
        f"prelay decode: --metrics-port: cannot listen on 127.0.0.1 port {port}: Address already in use" in process.log
    )
    assert "Traceback" not in process.log
