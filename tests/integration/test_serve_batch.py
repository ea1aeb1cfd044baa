"""Batches under `prelay serve`, and `prelay batch` against it, with the null model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.bed.chain import check_chain
from tests.bed.ports import free_port
from tests.bed.tokenizer import ids_of, words
from tests.integration.serve_process import Serve, ended, environment, is_gone, start, until

TOKENS = 8


@pytest.fixture(scope="module")
def fleet(null_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """A fleet with one batch worker. At the end it stops in order and leaves nothing."""
    state = tmp_path_factory.mktemp("batches") / "state"
    with ended(start(null_folder, state, "--batch", "1", "--null-step-ms", "4")) as serve:
        serve.until_ready()
        serve.wait_for(r"batch-0 │ .* is ready")
        yield serve
        assert serve.stop(signal.SIGINT) == 0
        assert "did not stop within" not in serve.log
        assert "Traceback" not in serve.log


def prompt(number: int) -> tuple[int, ...]:
    return (1, 2, number % 900 + 1)


def write(path: Path, count: int, tokens: int = TOKENS) -> Path:
    lines = []
    for number in range(count):
        body = {"model": "null", "prompt": words(prompt(number)), "max_tokens": tokens}
        lines.append({"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def batch(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "prelay", "batch", *map(str, arguments)],
        env=environment(**variables), capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_answers(path: Path, numbers: list[int], tokens: int = TOKENS) -> None:
    """The output has just these lines in this order, and each token of each is the null model's."""
    found = rows(path)
    assert [row["custom_id"] for row in found] == [f"c{number}" for number in numbers]
    for number, row in zip(numbers, found, strict=True):
        ids = ids_of(row["response"]["body"]["choices"][0]["text"])
        assert len(ids) == tokens
        check_chain(prompt(number), ids)


def test_a_file_of_requests_becomes_a_file_of_answers(fleet: Serve, tmp_path: Path) -> None:
    given, output = write(tmp_path / "in.jsonl", 120), tmp_path / "out.jsonl"
    with given.open("a") as file:
        file.write('\n{"custom_id": "no model", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n')
        file.write("no json\n")
    done = batch("run", given, "-o", output, "--ordered", "--url", fleet.url)
    assert done.returncode == 1, done.stderr
    check_answers(output, list(range(120)))
    refused, broken = rows(tmp_path / "out.errors.jsonl")
    assert refused["custom_id"] == "no model"
    assert refused["response"]["status_code"] == 400
    assert broken["error"]["line"] == 123
    assert f"✓ {output}: 120 answers, 960 tokens, in " in done.stderr
    again = batch("run", given, "-o", output, "--ordered", "--url", fleet.url)
    assert again.returncode == 1
    assert "is the output of in.jsonl already" in again.stderr


@pytest.mark.slow
def test_a_cancelled_batch_has_an_answer_or_an_error_for_each_line(fleet: Serve, tmp_path: Path) -> None:
    given, output = write(tmp_path / "in.jsonl", 300, 1_000), tmp_path / "out.jsonl"
    batch_id = batch("submit", given, "--url", fleet.url).stdout.strip()
    assert batch("cancel", batch_id, "--url", fleet.url).returncode == 0
    assert batch("status", batch_id, "--watch", "--url", fleet.url).returncode == 3
    assert batch("download", batch_id, "-o", output, "--url", fleet.url).returncode == 3
    answered, failed = rows(output), rows(tmp_path / "out.errors.jsonl")
    assert sorted(row["custom_id"] for row in [*answered, *failed]) == sorted(f"c{n}" for n in range(300))
    assert {row["error"]["code"] for row in failed} == {"batch_cancelled"}


@pytest.mark.slow
def test_a_run_that_is_interrupted_goes_on_with_its_batch(fleet: Serve, tmp_path: Path) -> None:
    given, output = write(tmp_path / "in.jsonl", 300, 100), tmp_path / "out.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-m", "prelay", "batch", "run", str(given), "-o", str(output), "--url", fleet.url],
        env=environment(), stderr=subprocess.PIPE, text=True, preexec_fn=_hears_interrupts,
    )  # fmt: skip
    assert process.stderr is not None
    seen = [next(line for line in process.stderr if line.startswith("… in_progress"))]
    process.send_signal(signal.SIGINT)
    seen += process.stderr.readlines()
    process.stderr.close()
    assert process.wait(30) == 130
    command = re.search(r"fetch it later:  prelay (.*)\n", "".join(seen))
    assert command is not None, seen
    done = batch(*command[1].split()[1:])
    assert done.returncode == 0, done.stderr
    assert sorted(row["custom_id"] for row in rows(output)) == sorted(f"c{n}" for n in range(300))


def _hears_interrupts() -> None:
    """Whoever runs the tests in the background hands an ignored SIGINT down."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.slow
def test_a_batch_worker_that_is_killed_comes_back_and_each_line_has_one_answer(fleet: Serve, tmp_path: Path) -> None:
    given, output = write(tmp_path / "in.jsonl", 400, 60), tmp_path / "out.jsonl"
    submitted = batch("submit", given, "--url", fleet.url)
    batch_id = submitted.stdout.strip()

    def some_are_done() -> bool:
        counts = httpx.get(f"{fleet.url}/v1/batches/{batch_id}", timeout=10).json()["request_counts"]
        return bool(0 < counts["completed"] < 400)

    until(some_are_done, "some lines are done", 60, lambda: fleet.log)
    worker = fleet.children()["batch-worker"]
    worker = next((parent for parent in worker.parents() if parent.cmdline() == worker.cmdline()), worker)
    horses = worker.children(recursive=True)
    worker.kill()
    fleet.wait_for(r"batch-0 │ ended with signal SIGKILL; starts again")
    until(lambda: all(map(is_gone, horses)), "its work horse is gone", 10)
    done = batch("status", batch_id, "--watch", "--url", fleet.url)
    assert done.returncode == 0, done.stderr
    assert batch("download", batch_id, "-o", output, "--ordered", "--url", fleet.url).returncode == 0
    check_answers(output, list(range(400)), 60)


@pytest.mark.slow
def test_a_run_with_a_server_of_its_own_starts_it_stops_it_and_survives_both(null_folder: Path, tmp_path: Path) -> None:
    """The first is killed in the middle: its server ends in order by itself. The second starts another on its state."""
    given, output, state = write(tmp_path / "in.jsonl", 200, 60), tmp_path / "out.jsonl", tmp_path / "state"
    null = ("--null-model", "--model", str(null_folder), "--served-model-name", "null", "--null-step-ms", "10")
    own = ("--serve", "--", *null, "--batch", "1", "--state-dir", str(state))
    first = subprocess.Popen(
        [sys.executable, "-m", "prelay", "batch", "run", str(given), "-o", str(output), *own],
        env=environment(), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert first.stderr is not None
    said = next(line for line in first.stderr if line.startswith("… in_progress"))
    server = psutil.Process(first.pid).children()
    parts = psutil.Process(first.pid).children(recursive=True)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    first.stderr.close()
    assert len(server) == 1
    until(lambda: all(map(is_gone, parts)), "nothing is left of the server", 60, lambda: said)
    second = batch("run", given, "-o", output, "--ordered", *own)
    assert second.returncode == 0, second.stderr
    assert "goes on with batch_" in second.stderr
    check_answers(output, list(range(200)), 60)
    assert not (state / "server" / "redis.sock").exists()


@pytest.mark.slow
def test_when_its_own_server_is_killed_a_run_says_so_and_how_to_go_on(null_folder: Path, tmp_path: Path) -> None:
    given, output, state = write(tmp_path / "in.jsonl", 200, 60), tmp_path / "out.jsonl", tmp_path / "state"
    null = ("--null-model", "--model", str(null_folder), "--served-model-name", "null", "--null-step-ms", "20")
    own = ("--serve", "--", *null, "--batch", "1", "--state-dir", str(state))
    with subprocess.Popen(
        [sys.executable, "-m", "prelay", "batch", "run", str(given), "-o", str(output), *own],
        env=environment(), stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        next(line for line in process.stderr if line.startswith("… in_progress"))
        (server,) = psutil.Process(process.pid).children()
        server.kill()
        said = process.stderr.read()
        assert process.wait(60) == 1
    assert "prelay: prelay serve ended with signal SIGKILL" in said
    assert f"prelay batch run -o {output} --resume --serve -- --null-model" in said
    assert "Traceback" not in said


def test_a_server_of_its_own_that_cannot_start_is_one_line(null_folder: Path, tmp_path: Path) -> None:
    given, port = write(tmp_path / "in.jsonl", 1), free_port()
    own = ("--serve", "--", "--state-dir", str(tmp_path / "s"), "--port", str(port), "--model", str(tmp_path / "none"))
    done = batch("run", given, "-o", tmp_path / "out", *own)
    assert done.returncode == 1
    assert re.search(
        r"^prelay: prelay serve ended with exit code 1: prelay: --model .*: no such folder", done.stderr, re.M
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "s"]
