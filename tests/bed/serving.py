"""`prelay serve` as a user starts it, on a free port with a state folder of its own, leaving nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import redis

from prelay.statedir import socket_path
from prelay_kv.shm import sweep
from tests.bed.ports import free_port

from .http import get
from .pools import is_accounted, is_whole, left_in
from .processes import until

#: For benchmarks: what tests change so that they bear each other is as users have it.
AS_IT_IS = {"PRELAY_DECODE_NICE": ""}


class Serving:
    """A running `prelay serve`, without batch workers unless it is given `--batch`.

    `url` is where; `log` is what it and its children said.
    """

    def __init__(self, *arguments: str, model: Path, environment: dict[str, str] | None = None) -> None:
        self.state = tempfile.TemporaryDirectory(prefix="pl-")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._last_words = ""
        self._log = tempfile.NamedTemporaryFile(prefix="serve-", suffix=".log")  # noqa: SIM115 - lives as long
        command = [sys.executable, "-m", "prelay", "serve", "--port", str(self.port), "--model", str(model)]
        self.process = subprocess.Popen(
            [*command, "--state-dir", self.state.name, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            # Other tests want the cores as much as its prefill worker does.
            env={**os.environ, "PRELAY_BATCH": "0", "PRELAY_DECODE_NICE": "0", **(environment or {})},
            cwd=self.state.name,
        )

    @property
    def log(self) -> str:
        return self._last_words if self._log.closed else Path(self._log.name).read_text()

    def until_ready(self, timeout_s: float = 100) -> None:
        """Wait until a request would be served; fail with the log when the process ends instead."""

        def ready() -> bool:
            assert self.process.poll() is None, f"prelay serve ended with {self.process.returncode}:\n{self.log}"
            with contextlib.suppress(httpx.TransportError):
                return get(f"{self.url}/health/ready", timeout=5).status_code == 200
            return False

        until(ready, timeout_s, every_s=0.1)

    def workers(self, role: str = "") -> list[dict[str, Any]]:
        """The live workers of a role, as the admin page lists them."""
        listed = get(f"{self.url}/admin/workers", timeout=10).json()["workers"]
        return [w for w in listed if role in ("", w["role"]) and not w["stale"]]

    def heard_anew(self, role: str) -> dict[str, Any]:
        """The one worker of a role, as a heartbeat says that is later than this call."""

        def newer() -> dict[str, Any] | None:
            (worker,) = self.workers(role)
            return worker if worker["t"] > first["t"] else None

        (first,) = self.workers(role)
        found: dict[str, Any] = until(newer)
        return found

    def kill(self, role: str) -> int:
        """SIGKILL the worker of a role that has a job, or its only one; return its pid."""
        workers = self.workers(role)
        if len(workers) > 1:  # what they said last of themselves may be older than the job
            owners = {job["owner"] for job in get(f"{self.url}/admin/jobs", timeout=10).json()["jobs"]}
            workers = [worker for worker in workers if worker["id"] in owners]
        (worker,) = workers
        os.kill(worker["pid"], signal.SIGKILL)
        return int(worker["pid"])

    def until_drained(self, timeout_s: float = 20) -> None:
        """Wait until all workers say anew that nobody holds a block, and no job is open. All accounts must be right."""
        before = {worker["id"]: worker["t"] for worker in self.workers()}

        def drained() -> bool:
            workers = self.workers()
            assert all(is_accounted(worker["kv"]) for worker in workers), workers
            anew = all(worker["t"] > before.get(worker["id"], 0) for worker in workers)
            return bool(workers) and anew and all(is_whole(worker["kv"]) for worker in workers)

        until(drained, timeout_s)
        with redis.Redis(unix_socket_path=str(socket_path(Path(self.state.name))), protocol=2) as client:
            until(lambda: not left_in(client), timeout_s)

    def left_segments(self) -> list[str]:
        """Sweep the memory of the dead; what this server's own workers have left of it. Other tests kill some, too."""
        pids = re.findall(r"worker \S+:(\d+):\w+ is ready", self.log)
        return [name for name in sweep() if any(f"_{pid}_" in name for pid in pids)]

    def stop(self) -> int:
        """SIGTERM, as Ctrl-C does; return the exit code and check that nothing is left."""
        children = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        if self.process.poll() is None:
            self.process.terminate()
        code = self.process.wait(40)
        _, alive = psutil.wait_procs(children, timeout=5)
        for process in alive:
            process.kill()
        self.state.cleanup()
        self._last_words = self.log
        self._log.close()
        assert not alive, f"left running: {alive}\n{self.log}"
        return code


@contextlib.contextmanager
def serving(*arguments: str, model: Path, environment: dict[str, str] | None = None) -> Iterator[Serving]:
    """A server that is ready, and that leaves no block, no process and no shared memory."""
    server = Serving(*arguments, model=model, environment=environment)
    try:
        server.until_ready()
        yield server
        server.until_drained()
    finally:
        code = server.stop()
    assert code == 0, server.log
    assert not server.left_segments(), "a segment of a dead worker was left in shared memory"
