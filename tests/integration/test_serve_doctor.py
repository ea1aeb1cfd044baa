"""`prelay doctor` on this machine and on broken ones, with real servers."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.crc import key_slot

from prelay.doctor.examine import LIAR, examine
from prelay.doctor.examine import Server as Visit
from prelay.doctor.server import cluster, scripts
from prelay.errors import ServerError
from prelay_queue.keys import Keys
from tests.bed.bound import bound
from tests.bed.cudart import fake_gpus, library
from tests.bed.ports import free_port
from tests.bed.servers import Server, make_server
from tests.bed.tokenizer import words
from tests.integration.serve_process import Serve, environment, until


def run(*arguments: str, **variables: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "prelay", "doctor", *arguments],
        env=environment(**({"COLUMNS": "300"} | variables)), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def rows(*arguments: str, **variables: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run it for machines: the exit code, and each row by the name of its check."""
    code, shown = run("--json", *arguments, **variables)
    found = json.loads(shown)
    assert found["ok"] is (code == 0)
    return code, {row["name"]: row for row in found["checks"]} | {name: {} for name in found["skipped"]}


@pytest.fixture
def null(null_folder: Path, tmp_path: Path) -> tuple[str, ...]:
    """Options with which everything is sound."""
    state = str(tmp_path / "state")
    return ("--null-model", "--model", str(null_folder), "--port", str(free_port()), "--state-dir", state)


def test_a_sound_machine_passes_every_check_and_nothing_is_left(null: tuple[str, ...], tmp_path: Path) -> None:
    scratch = set(Path(tempfile.gettempdir()).glob("prelay-doctor-*"))
    code, table = run(*null)
    assert code == 0, table
    machine = ("python", "CPU", "GPU", "workers", "memory", "/dev/shm")
    for name in (*machine, "model", "port", "state directory", "server", "scripts"):
        assert f"✓  {name}" in table
    assert "private, started for this look" in table
    assert "EVALSHA runs them, flags are kept" in table
    assert "0 failed" in table
    assert list(tmp_path.iterdir()) == [], "the state directory was only looked at"
    assert set(Path(tempfile.gettempdir()).glob("prelay-doctor-*")) <= scratch


GPU_ROWS = ("torch", "Triton", "CUDA runtime", "cards", "shares", "peer access", "KV path", "/dev/shm for KV")


def test_gpus_that_nobody_asks_for_are_shown_and_their_driver_is_left_alone(
    null: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    tools = tmp_path_factory.mktemp("tools")
    smi(tools, "echo 'NVIDIA H200, 143771 MiB, 580.65'")
    path = f"{tools}:{os.environ['PATH']}"
    code, found = rows(*null, PATH=path, PRELAY_CUDART="/nowhere")
    assert code == 0, found
    assert found["GPU"]["found"] == "NVIDIA H200, 143771 MiB, 580.65: not used without --device cuda"
    assert found.keys().isdisjoint(GPU_ROWS)


def test_gpus_that_are_asked_for_are_looked_at_by_processes_of_their_own(
    null_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tools, gpus = (tmp_path_factory.mktemp(name) for name in ("tools", "gpus"))
    with fake_gpus(gpus) as fake:
        fake.set(devices=2, fail="cudaIpcOpenMemHandle=304")
        uuid = fake.runtime.device_uuid(0)
        line = f"NVIDIA H200, 143771 MiB, 143000 MiB, 580.65, {uuid}, Disabled, Default, Enabled, 9.0"
        smi(tools, f"echo '{line}'")
        code, found = rows(
            "--device", "cuda", "--decode-gpus", "1", "--model", str(null_folder),
            PATH=f"{tools}:{os.environ['PATH']}", PRELAY_CUDART=str(library()),
        )  # fmt: skip
    assert code == 1, "the model has no weights"
    assert found["GPU"]["found"] == "NVIDIA H200, 143771 MiB, 580.65"
    assert f"0: NVIDIA H200, {uuid[:12]}, 1.0 GiB of 1.0 GiB free" in found["cards"]["found"]
    assert found["peer access"]["state"] == "ok"
    assert found["KV path"]["state"] == "warn"
    assert "(304)" in found["KV path"]["found"]
    assert found["environment"]["state"] == "ok"


def test_a_machine_without_the_gpu_that_is_asked_for_fails_and_hangs_nowhere(
    null_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tools = tmp_path_factory.mktemp("tools")
    smi(tools, "kill -9 $$")
    path = f"{tools}:{os.environ['PATH']}"
    arguments = ("--device", "cuda", "--model", str(null_folder))
    code, found = rows(*arguments, PATH=path, PRELAY_CUDART="/nowhere/libcudart.so")
    assert code == 1
    for name in ("GPU", "CUDA runtime"):
        assert found[name]["state"] == "fail"
        assert found[name]["advice"]
    assert "nvidia-smi" in found["GPU"]["found"]
    assert "/nowhere/libcudart.so" in found["CUDA runtime"]["found"]
    assert "KV path" not in found


def smi(folder: Path, script: str) -> None:
    """An nvidia-smi that does this."""
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)


def test_what_batches_need_is_looked_at(own_server: Server, null: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "note").write_text("")
    code, found = rows(*null, "--batch-redis-url", own_server.url, "--files-dir", str(tmp_path / "files"))
    assert code == 0, found
    assert found["files of batches"]["found"].startswith(f"{tmp_path / 'files'} (made at the first start)")
    assert own_server.url in found["server of batch jobs"]["found"]
    nowhere = f"unix://{tmp_path}/nobody"
    code, found = rows(*null, "--batch-redis-url", nowhere, "--files-dir", str(tmp_path / "note"))
    assert code == 1
    assert (found["files of batches"]["state"], found["server of batch jobs"]["state"]) == ("fail", "fail")
    assert "is not a directory" in found["files of batches"]["found"]
    assert found["server of batch jobs"]["found"].startswith(f"--batch-redis-url {nowhere}: Redis does not answer")


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_fits_a_terminal(columns: int, null: tuple[str, ...]) -> None:
    _, table = run(*null, COLUMNS=str(columns))
    assert max(map(len, table.splitlines())) <= columns
    assert "…" not in table


def test_each_fault_is_named_with_what_to_do_and_the_exit_code_is_one(own_server: Server, tmp_path: Path) -> None:
    own_server.client.config_set("maxmemory-policy", "allkeys-lru")
    own_server.client.config_set("maxmemory", "64mb")
    own_server.client.config_set("appendonly", "no")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        arguments = ("--redis-url", own_server.url, "--model", str(tmp_path), "--port", port)
        code, found = rows(*arguments, PRELAY_KVBLOCKS="1")
    assert code == 1
    states = {name: found[name]["state"] for name in ("environment", "eviction", "persistence", "model", "port")}
    assert states == {
        "environment": "warn", "eviction": "fail", "persistence": "warn", "model": "fail", "port": "fail",
    }  # fmt: skip
    assert found["environment"]["items"] == ["PRELAY_KVBLOCKS"]
    assert "CONFIG SET maxmemory-policy noeviction" in found["eviction"]["advice"]
    assert found["model"]["advice"].startswith("--model takes")
    assert "cannot be told: the model cannot be read" in found["memory"]["found"]


def test_a_server_that_does_not_answer_fails_once_and_the_rest_is_still_looked_at(null: tuple[str, ...]) -> None:
    code, found = rows(*null, "--redis-url", "redis://:hush@127.0.0.1:1/0")
    assert code == 1
    assert found["server"]["state"] == "fail"
    assert "is it running" in found["server"]["advice"]
    assert "hush" not in json.dumps(found)
    assert found["port"]["state"] == "ok"
    assert found["eviction"] == found["dead letters"] == {}, "skipped, and named as skipped"


def test_beside_a_running_fleet_it_looks_at_that_ones_server_and_finds_nothing_left_over(
    null: tuple[str, ...], tmp_path: Path, null_folder: Path
) -> None:
    """Under load, so that jobs move while they are looked at."""
    arguments = ("--null-model", "--model", str(null_folder), "--served-model-name", "null")
    serve = Serve(*arguments, state=tmp_path / "state")
    try:
        serve.until_ready()
        with asked_all_the_time(serve.url) as answers:
            code, found = rows(*null[:3], "--state-dir", str(serve.state), "--port", str(serve.port))
    finally:
        serve.close()
    assert code == 0, found
    assert all(row["state"] == "ok" for name, row in found.items() if name != "environment"), found
    assert f"of the running prelay serve, {serve.state}/server/redis.sock" in found["server"]["found"]
    assert f"(pid {serve.process.pid})" in found["state directory"]["found"]
    assert "is the running prelay serve's, which is ready" in found["port"]["found"]
    assert "2 live worker(s)" in found["fleets"]["found"]
    assert found["dead letters"]["found"] == "none"
    assert len(answers) > 20
    assert set(answers) == {200}, "looking at it disturbs nobody"


@contextlib.contextmanager
def asked_all_the_time(url: str) -> Iterator[list[int]]:
    """Four clients that ask short questions one after the other; the status of each answer."""
    answers: list[int] = []
    stop = threading.Event()

    def ask() -> None:
        body = {"model": "null", "prompt": words((1, 2, 3)), "max_tokens": 10}
        with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
            while not stop.wait(0.02):
                answers.append(client.post("/v1/completions", json=body).status_code)

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask) for _ in range(4)]
        try:
            until(lambda: len(answers) > 20, "questions are answered")
            yield answers
        finally:
            stop.set()
        for one in asking:
            one.result()


# --- one visit to a server


def visit(server: Server) -> Visit:
    return examine(server.url, "here", "fleet")


def test_a_visit_finds_out_everything_and_leaves_nothing(own_server: Server) -> None:
    found = visit(own_server)
    assert (found.about.role, found.scripts, found.moved) == ("master", "", "")
    assert found.config["appendfsync"] == "always"
    assert abs(found.ahead_s) < 0.5, "one clock"
    assert len(found.trips_ms) == 20
    assert own_server.client.dbsize() == 0


def test_a_replica_is_seen_and_named_with_its_master(own_server: Server) -> None:
    own_server.client.replicaof("127.0.0.1", "1")
    found = visit(own_server)
    assert found.about.role == "slave"
    assert (found.info["master_host"], found.info["master_port"]) == ("127.0.0.1", 1)


def test_a_user_that_may_not_run_scripts_fails_and_one_that_may_not_scan_is_told_so(own_server: Server) -> None:
    own_server.client.acl_setuser("mute", True, passwords=["+pw"], keys=["*"], commands=["+@all", "-evalsha"])
    found = examine(f"unix://mute:pw@{own_server.socket}", "here", "fleet")
    assert scripts(found).state == "fail"
    assert "evalsha" in scripts(found).found
    few = ["+@all", "-scan", "-config"]
    own_server.client.acl_setuser("blind", True, passwords=["+pw"], keys=["*"], commands=few)
    found = examine(f"unix://blind:pw@{own_server.socket}", "here", "fleet")
    assert (found.scripts, found.config, found.looks) == ("", {}, None)
    assert "scan" in found.no_looks


def test_a_wrong_password_is_one_line_without_it(own_server: Server) -> None:
    own_server.client.config_set("requirepass", "right")
    with pytest.raises(ServerError, match="password") as refused:
        examine(f"unix://:wrong-secret@{own_server.socket}", "here", "fleet")
    assert "secret" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_server_that_does_not_keep_the_flags_of_scripts_is_found_out(
    own_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No real one is so: the script that must be refused is given without its flag."""
    monkeypatch.setattr("prelay.doctor.examine.LIAR", LIAR.replace(" flags=no-writes", ""))
    assert "does not keep script flags" in visit(own_server).scripts
    until(lambda: own_server.client.dbsize() == 0, "even then nothing stays")


@pytest.fixture
def cluster_of_two() -> Iterator[tuple[Server, Server]]:
    """Two nodes that know each other: the first has the lower half of the slots, the second the upper."""
    with contextlib.ExitStack() as stack:
        nodes, buses = [], []
        for _ in range(2):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bed-"))
            port, bus = str(free_port()), str(free_port())
            options = ("--cluster-enabled", "yes", "--bind", "127.0.0.1", "--port", port, "--cluster-port", bus)
            node = make_server("valkey", Path(folder), *options)
            stack.callback(node.close)
            node.start()
            nodes.append(node)
            buses.append((port, bus))
        first, second = nodes
        first.client.execute_command("CLUSTER", "ADDSLOTSRANGE", "0", "8191")
        second.client.execute_command("CLUSTER", "ADDSLOTSRANGE", "8192", "16383")
        first.client.execute_command("CLUSTER", "MEET", "127.0.0.1", *buses[1])
        for node in nodes:
            asked: Callable[..., Any] = node.client.execute_command
            is_up = bound(lambda ask: b"cluster_state:ok" in ask("CLUSTER", "INFO"), asked)
            until(is_up, "the cluster is up")
        yield first, second


def fleet_in(low: bool) -> str:
    names = (f"fleet{number}" for number in range(100))
    return next(name for name in names if (key_slot(Keys(name).queued.encode()) < 8192) is low)


def test_a_cluster_does_while_the_node_has_the_fleets_slot_and_fails_where_another_has_it(
    cluster_of_two: tuple[Server, Server],
) -> None:
    first, second = cluster_of_two
    here = examine(first.url, "here", fleet_in(low=True))
    assert (cluster(here).state, here.moved, here.scripts) == ("warn", "", "")
    elsewhere = examine(first.url, "here", fleet_in(low=False))
    port = second.client.config_get("port")["port"]
    assert elsewhere.moved == f"127.0.0.1:{port}"
    assert cluster(elsewhere).state == "fail"
