"""A rolling restart of every role under load: no request fails, no token is wrong, no line of a batch is lost."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from prelay.client import stream
from prelay.main import main
from prelay_worker.config import NullModel, Role
from tests.bed.batch import Batches, jsonl, lines
from tests.bed.chain import Listener, check_stream, expected_chain
from tests.bed.http import get
from tests.bed.ports import free_port
from tests.bed.processes import Api, Fleet, Process, fleet, until, until_ready
from tests.bed.servers import Server
from tests.bed.tokenizer import ids_of, words
from tests.integration.serve_process import Serve

TOKENS = 300
STREAMS = 6


Prompt = tuple[int, ...]


def body(prompt: Prompt) -> dict[str, Any]:
    return {"model": "null", "prompt": words(prompt), "max_tokens": TOKENS, "ignore_eos": True}


def plain(pick: Callable[[], str]) -> Callable[[Prompt], None]:
    """A client that asks once, and takes no for a failure. `pick` is the load balancer."""

    def ask(prompt: Prompt) -> None:
        check_stream(Listener(pick(), "/v1/completions", body(prompt)).end(90), prompt, TOKENS)

    return ask


def resuming(*urls: str) -> Callable[[Prompt], None]:
    """`prelay.client`: it knows all API processes, and goes on at another one."""

    def ask(prompt: Prompt) -> None:
        chunks = list(stream("/v1/completions", body(prompt), url=urls))
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert ids_of("".join(choice["text"] for choice in choices)) == expected_chain(prompt, TOKENS)
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
        assert len({chunk["id"] for chunk in chunks}) == 1

    return ask


class Load:
    """So many requests at a time of each kind, until `end`; each is checked."""

    def __init__(self, *clients: Callable[[Prompt], None]) -> None:
        self._number = itertools.count(1)
        self._enough = threading.Event()
        self.ended = 0
        self.failed: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(client,)) for client in clients for _ in range(STREAMS)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, client: Callable[[Prompt], None]) -> None:
        try:
            while not self._enough.is_set():
                client((7, next(self._number), 9))
                self.ended += 1
        except BaseException as error:
            self.failed.append(error)

    def end(self) -> None:
        """Ask no more, and raise what failed."""
        self._enough.set()
        for thread in self._threads:
            thread.join()
        for error in self.failed:
            raise error


@contextmanager
def load(*clients: Callable[[Prompt], None]) -> Iterator[Load]:
    found = Load(*clients)
    try:
        yield found
    finally:
        found.end()


def pids(serve: Serve, role: str) -> set[int]:
    return {worker["pid"] for worker in get(f"{serve.url}/admin/workers").json()["workers"] if worker["role"] == role}


@pytest.mark.slow
def test_workers_are_replaced_one_after_the_other_under_load_and_nobody_notices(
    null_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serve = Serve(
        "--null-model", "--model", str(null_folder), "--served-model-name", "null", "--null-step-ms", "5",
        "--prefill", "2", "--decode", "2", state=tmp_path / "state",
    )  # fmt: skip
    try:
        serve.until_ready()
        before = {role: pids(serve, role) for role in ("prefill", "decode")}
        with load(plain(lambda: serve.url)) as traffic:
            for role in before:
                assert main(["drain", "--role", role, "--rolling", "--url", serve.url]) == 0
        said = capsys.readouterr().out
        assert said.count("workers ready\n") == 4
        assert traffic.ended >= STREAMS
        for role, old in before.items():
            assert not old & pids(serve, role)
        assert main(["jobs", "ls", "--url", serve.url]) == 0
        assert capsys.readouterr().out == "0 jobs\n"
        assert serve.stop() == 0
    finally:
        serve.close()
    assert serve.leftovers() == []


class Balancer:
    """Deals out what comes among the API processes that stand in it."""

    def __init__(self, *urls: str) -> None:
        self.urls = list(urls)
        self._turn = itertools.count()

    def pick(self) -> str:
        urls = list(self.urls)
        return urls[next(self._turn) % len(urls)]


def replaced(found: Fleet, old: Process, start: Callable[[], Process]) -> None:
    """SIGTERM, and its successor once it has ended."""
    assert old.stop(30) == 0, old.log
    found.processes.remove(old)
    start()


@pytest.mark.slow
def test_api_processes_unified_and_batch_workers_are_replaced_under_load_and_a_batch_and_nobody_notices(
    shared_server: Server, null_folder: Path, tmp_path: Path
) -> None:
    settings = shared_server.settings()
    asked = lines(1000, max_tokens=30)
    with fleet(settings, null_folder) as found:
        ports = [free_port() for _ in range(2)]

        def api(port: int) -> Api:
            process = found.api(port=port, files_dir=tmp_path, drain_s=15.0)
            until_ready(process.url)
            return process

        def unified() -> Process:
            return found.worker(Role.UNIFIED, null=NullModel(step_ms=5))

        def batch_worker() -> Process:
            return found.batch_worker(tmp_path)

        workers = [unified() for _ in range(2)]
        apis = [api(port) for port in ports]
        runners = [batch_worker() for _ in range(2)]
        batches = Batches(settings, tmp_path)
        balancer = Balancer(*(each.url for each in apis))
        batch = batches.create(jsonl(asked))
        until(lambda: batches.look(batch).progress.completed > 10)
        with load(plain(balancer.pick), resuming(*balancer.urls)) as traffic:
            for runner in runners:  # before the batch is over
                replaced(found, runner, batch_worker)
            for worker in workers:
                replaced(found, worker, unified)
            for each, port in zip(apis, ports, strict=True):
                balancer.urls.remove(each.url)  # no more comes to it; what it has, it ends
                replaced(found, each, lambda port=port: api(port))  # type: ignore[misc]
                balancer.urls.append(each.url)
            epoch = batches.look(batch).epoch
        assert traffic.ended >= 2 * STREAMS
        assert batches.until_over(batch).status == "completed"
        batches.check(batch, asked)
        assert epoch > 1  # it was handed on
        batches.close()


@pytest.mark.slow
def test_api_processes_on_one_port_are_replaced_under_load_of_clients_that_resume(
    null_folder: Path, tmp_path: Path
) -> None:
    serve = Serve(
        "--null-model", "--model", str(null_folder), "--served-model-name", "null", "--null-step-ms", "5",
        "--unified", "1", "--api", "2", "--drain-s", "0.5", state=tmp_path / "state",
    )  # fmt: skip

    def is_api(child: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):  # it may end while we look
            return child.cmdline()[1:5] == ["-P", "-m", "prelay", "api"]
        return False

    def apis() -> set[int]:
        return {child.pid for child in psutil.Process(serve.process.pid).children() if is_api(child)}

    try:
        serve.until_ready()
        before = apis()
        assert len(before) == 2
        with load(resuming(serve.url)) as traffic:
            for pid in before:
                here = traffic.ended
                psutil.Process(pid).send_signal(signal.SIGTERM)
                until(lambda pid=pid: pid not in apis() and len(apis()) == 2, 30)  # type: ignore[misc]
                until(lambda here=here: traffic.ended >= here + STREAMS or traffic.failed, 60)  # type: ignore[misc]
        assert not before & apis()
        until(lambda: get(f"{serve.url}/admin/jobs").json()["jobs"] == [])
        assert serve.stop() == 0
    finally:
        serve.close()
    assert serve.leftovers() == []
