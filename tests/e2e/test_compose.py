"""docker-compose.yml on this machine, without containers: what its profile `cpu` starts, serves and leaves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from prelay.segments import segment_files
from prelay_engine.demo import demo_folder
from tests.bed.compose import ROOT, Composed, composed
from tests.bed.http import get
from tests.bed.processes import until

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make secrets` makes."""
    folder = tmp_path_factory.mktemp("secrets")
    subprocess.run([ROOT / "scripts" / "secrets.sh"], env={**os.environ, "SECRETS_DIR": str(folder)}, check=True)
    return folder


@pytest.fixture(scope="module")
def fleet(demo_model: Path, secrets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composed]:
    """All services, healthy. The demo model is in the volume `cache` already, so that nothing is fetched."""
    folder = tmp_path_factory.mktemp("compose")
    with composed("cpu", secrets, folder) as found:
        place = demo_folder(found.volume("cache"))
        place.parent.mkdir(parents=True)
        place.symlink_to(demo_model)
        found.start()
        yield found


@pytest.fixture
def client(fleet: Composed, secrets: Path) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{fleet.port('api', 8000)}/v1"
    with openai.OpenAI(base_url=url, api_key=(secrets / "api_key").read_text(), max_retries=0) as found:
        yield found


def test_every_service_is_healthy_and_a_request_is_served(fleet: Composed, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    question: Any = [{"role": "user", "content": "What is the capital of France?"}]
    stream = client.chat.completions.create(model=MODEL, messages=question, temperature=0, max_tokens=20, stream=True)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert "Paris" in said
    log = fleet.services["decode-cpu"].log.read_text() + fleet.services["prefill-cpu"].log.read_text()
    assert "is ready" in log


def test_a_batch_runs(client: openai.OpenAI) -> None:
    body = {"model": MODEL, "prompt": "The sea is", "max_tokens": 3, "temperature": 0}
    rows = [{"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body} for n in range(8)]
    file = client.files.create(file=("b.jsonl", "\n".join(map(json.dumps, rows)).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    ended = until(lambda: (b := client.batches.retrieve(batch.id)).status == "completed" and b, 90, 0.2)
    lines = [json.loads(line) for line in client.files.content(ended.output_file_id).text.splitlines()]
    assert sorted(line["custom_id"] for line in lines) == [str(n) for n in range(8)]
    assert len({line["response"]["body"]["choices"][0]["text"] for line in lines}) == 1


def test_what_prometheus_is_told_to_scrape_answers(fleet: Composed, secrets: Path) -> None:
    api = f"http://127.0.0.1:{fleet.port('api', 8000)}/metrics"
    assert get(api).status_code == 401
    key = (secrets / "api_key").read_text()
    assert "prelay_redis_up 1.0" in get(api, headers={"authorization": f"Bearer {key}"}).text
    for name in ("prefill-cpu", "decode-cpu", "batch"):
        assert "prelay_redis_errors_total" in get(f"http://127.0.0.1:{fleet.port(name, 9100)}/metrics").text


def test_no_secret_is_in_arguments_or_logs(fleet: Composed, secrets: Path) -> None:
    hidden = [file.read_text() for file in secrets.iterdir()]
    assert len(hidden) == 3
    running = fleet.processes()
    assert len(running) >= 6
    for process in running:
        with contextlib.suppress(psutil.NoSuchProcess):
            assert not [secret for secret in hidden if secret in " ".join(process.cmdline())]
    for service in fleet.services.values():
        assert not [secret for secret in hidden if secret in service.log.read_text()]


def test_without_its_password_redis_answers_nothing(fleet: Composed) -> None:
    command = ["redis-cli", "-p", str(fleet.port("redis", 6379)), "get", "x"]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    assert "NOAUTH" in said.stdout + said.stderr


def test_a_worker_that_stands_still_is_unhealthy_and_the_api_not_ready_until_it_goes_on(fleet: Composed) -> None:
    decode, api = fleet.services["decode-cpu"], fleet.services["api"]
    assert decode.process is not None
    decode.process.send_signal(signal.SIGSTOP)
    until(lambda: not fleet.is_healthy(decode), 30)
    until(lambda: not fleet.is_healthy(api), 30)
    decode.process.send_signal(signal.SIGCONT)
    until(lambda: fleet.is_healthy(decode) and fleet.is_healthy(api), 30)


def test_all_end_within_their_grace_and_leave_nothing(fleet: Composed) -> None:
    pids = {process.pid for process in fleet.processes()}
    codes = fleet.stop()
    assert codes.pop("shm") == -signal.SIGTERM  # sleep knows no better
    assert codes == dict.fromkeys(("redis", "api", "batch", "prefill-cpu", "decode-cpu"), 0)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert [path.name for path in segment_files() if any(f"_{pid}_" in path.name for pid in pids)] == []
