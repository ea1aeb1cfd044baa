"""A rolling restart of all workers of a service under load: no request fails, no token is wrong."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prelay.main import main
from tests.bed.chain import Listener, Stream, check_stream
from tests.bed.http import get
from tests.bed.tokenizer import words
from tests.integration.serve_process import Serve

TOKENS = 300
STREAMS = 6


class Load:
    """So many streams at a time, until `end`; each is checked."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._number = itertools.count(1)
        self._enough = threading.Event()
        self.ended: list[Stream] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(STREAMS)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._enough.is_set():
            prompt = (7, next(self._number), 9)
            body = {"model": "null", "prompt": words(prompt), "max_tokens": TOKENS, "ignore_eos": True}
            found = Listener(self._url, "/v1/completions", body).end(90)
            check_stream(found, prompt, TOKENS)
            self.ended.append(found)

    def end(self) -> None:
        self._enough.set()
        for thread in self._threads:
            thread.join()


@contextmanager
def load(url: str) -> Iterator[Load]:
    found = Load(url)
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
        with load(serve.url) as traffic:
            for role in before:
                assert main(["drain", "--role", role, "--rolling", "--url", serve.url]) == 0
        said = capsys.readouterr().out
        assert said.count("workers ready\n") == 4
        assert len(traffic.ended) >= STREAMS
        for role, old in before.items():
            assert not old & pids(serve, role)
        assert main(["jobs", "ls", "--url", serve.url]) == 0
        assert capsys.readouterr().out == "0 jobs\n"
        assert serve.stop() == 0
    finally:
        serve.close()
    assert serve.leftovers() == []
