"""A `prelay serve` of a test's own, and a look at what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from prelay.segments import segment_files
from tests.bed.http import get
from tests.bed.ports import free_port


def environment(**more: str) -> dict[str, str]:
    """The environment without any setting of the person who runs the tests. No batches unless they are asked for."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PRELAY_")}
    return kept | {"OMP_NUM_THREADS": "1", "PRELAY_BATCH": "0"} | more


class Serve:
    """One supervisor process, its output in a file. Its children are known by their state directory."""

    def __init__(self, *arguments: str, state: Path, port: int | None = None, **variables: str) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.state = state
        self._pids: set[int] = set()
        self._log = tempfile.NamedTemporaryFile(prefix="serve-", suffix=".log")  # noqa: SIM115 - lives as long
        command = [sys.executable, "-m", "prelay", "serve", "--state-dir", str(state), "--port", str(self.port)]
        self.process = subprocess.Popen(
            [*command, *arguments], env=environment(**variables), stdout=self._log, stderr=self._log, text=True
        )

    @classmethod
    def watch(cls, process: subprocess.Popen[Any], state: Path, port: int) -> Serve:
        """The same for one that is started already, whose output goes elsewhere."""
        serve = cls.__new__(cls)
        serve.port, serve.url, serve.state, serve.process = port, f"http://127.0.0.1:{port}", state, process
        serve._pids = set()
        serve._log = tempfile.NamedTemporaryFile(prefix="serve-", suffix=".log")  # noqa: SIM115 - lives as long
        return serve

    def is_ready(self) -> bool:
        try:
            return get(f"{self.url}/health/ready", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text()

    def wait_for(self, pattern: str, timeout_s: float = 60, times: int = 1) -> re.Match[str]:
        """Wait until the output has `times` matches, and return the last."""
        found: list[re.Match[str]] = []

        def look() -> bool:
            found[:] = re.finditer(pattern, self.log)
            assert len(found) >= times or self.process.poll() is None, f"ended without {pattern!r}:\n{self.log}"
            return len(found) >= times

        until(look, f"output {pattern!r}", timeout_s, lambda: self.log)
        return found[-1]

    def until_ready(self) -> None:
        self.wait_for("ready on http")
        self.children()  # their pids, for `leftovers`

    def children(self) -> dict[str, psutil.Process]:
        """Return the processes of this fleet by role, dead supervisors' ones included."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if words and process.cwd() == str(self.state / "server"):
                    found["server"] = process
                elif words[1:4] == ["-P", "-m", "prelay"] and _state_of(process) == str(self.state):
                    found[words[4]] = process
        self._pids |= {process.pid for process in found.values()}
        return found

    def stop(self, number: int = signal.SIGINT, timeout_s: float = 60) -> int:
        """Ask for an ordered stop and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def close(self) -> None:
        """End what is left, however the test ended."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        until(lambda: not self.children(), "all children gone", 20, lambda: str(self.children()))
        self._log.close()

    def leftovers(self) -> list[str]:
        """Return what an ended service may not leave: processes, its socket, segments."""
        left = [f"{role} {process}" for role, process in self.children().items()]
        left += [str(path) for path in self.state.glob("server/*.sock")]
        return left + [str(path) for path in segment_files() if any(f"_{pid}_" in path.name for pid in self._pids)]


def _state_of(process: psutil.Process) -> str | None:
    return process.environ().get("PRELAY_STATE_DIR")


def is_gone(process: psutil.Process) -> bool:
    """True when it has ended; an orphan stays a zombie until init takes notice."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until(what: Callable[[], object], words: str, timeout_s: float = 30, shown: Callable[[], str] = lambda: "") -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, f"never came true: {words}\n{shown()}"
        time.sleep(0.05)


def start(folder: Path, state: Path, *arguments: str) -> Serve:
    """Start a supervisor with the null model."""
    null = ("--null-model", "--model", str(folder), "--served-model-name", "null")
    return Serve(*null, *arguments, state=state)


@contextlib.contextmanager
def ended(serve: Serve) -> Iterator[Serve]:
    """However the test ends, nothing of it may be left."""
    try:
        yield serve
    finally:
        serve.close()
    assert serve.leftovers() == []
