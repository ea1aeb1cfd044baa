"""`prelay doctor` on this machine and on broken ones."""

from __future__ import annotations

import fcntl
import socket
import subprocess
import sys
from pathlib import Path

from prelay import doctor
from tests.bed.servers import Server
from tests.integration.serve_process import environment, free_port


def run(*arguments: str, **variables: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "prelay", "doctor", *arguments],
        env=environment(COLUMNS="300", **variables), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout


def test_a_sound_machine_passes_every_check_and_nothing_is_left_running(null_folder: Path) -> None:
    code, table = run("--null-model", "--model", str(null_folder), "--port", str(free_port()))
    assert code == 0, table
    for name in ("python", "environment", "server", "eviction", "persistence", "memory", "model", "port"):
        assert f"✓  {name}" in table
    assert "all scripts load" in table


def test_each_fault_is_named_with_what_to_do_and_the_exit_code_is_one(own_server: Server, tmp_path: Path) -> None:
    own_server.client.config_set("maxmemory-policy", "allkeys-lru")
    own_server.client.config_set("maxmemory", "64mb")
    own_server.client.config_set("appendonly", "no")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        arguments = ("--redis-url", own_server.url, "--model", str(tmp_path), "--port", port)
        code, table = run(*arguments, PRELAY_KVBLOCKS="1")
    assert code == 1
    assert "!  environment    unknown: PRELAY_KVBLOCKS" in table
    assert "✗  eviction       maxmemory-policy allkeys-lru" in table
    assert "CONFIG SET maxmemory-policy noeviction" in table
    assert "!  persistence    appendonly is off" in table
    assert "✗  model" in table
    assert "✗  port" in table


def test_a_server_that_does_not_answer_fails_and_the_rest_is_still_looked_at(null_folder: Path) -> None:
    port = str(free_port())
    code, table = run(
        "--redis-url", "redis://:hush@127.0.0.1:1/0", "--null-model", "--model", str(null_folder), "--port", port
    )
    assert code == 1
    assert "✗  server" in table
    assert "hush" not in table
    assert "✓  port" in table


def test_segments_of_dead_workers_are_counted_and_those_in_use_are_not(tmp_path: Path) -> None:
    with (tmp_path / "prelay-test.kv").open("wb") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        assert doctor._segments(tmp_path).found == "1 in use, none left over"
    check = doctor._segments(tmp_path)
    assert (check.state, check.found) == ("warn", "1 left by a crash: prelay-test.kv")
