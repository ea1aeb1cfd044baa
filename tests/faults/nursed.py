"""Worker processes of a real model, forked by the product's own nursery: torch is imported once for all of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prelay.nursery import modules_for
from prelay.nursery_process import MESSAGE_BYTES
from prelay_api.config import ApiConfig
from prelay_worker.config import WorkerConfig
from tests.bed.child import encode
from tests.bed.forks import ROOT
from tests.bed.servers import die_with_parent
from tests.faults.forked import WorkerProcess


class Fork:
    """One process of a nursery, which says how it ended."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid = pid
        self._nursery = nursery

    @property
    def exitcode(self) -> int | None:
        return self._nursery.code_of(self.pid)


class Nursery:
    """A nursery process and the link to it. Forks are made one after the other."""

    def __init__(self, model: Path) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # One thread in each worker; the pools read this when they are imported.
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "prelay.nursery_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()], cwd=ROOT, env=environment, preexec_fn=die_with_parent,
            )  # fmt: skip
        self._environment = environment
        self._link = ours
        self._link.settimeout(60)
        self._codes: dict[int, int] = {}
        self._lock = threading.Lock()
        self._send({"entry": "tests.bed.child:serve_nursed", "modules": modules_for(model)})
        assert self._hear() == {"ready": True}

    def fork(self, config: WorkerConfig, faults: str, log: Path) -> Fork:
        """Start a worker whose output goes to `log`."""
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        argv = [str(config.role), encode(config), faults]
        try:
            with self._lock:
                self._send({"id": 0, "argv": argv, "environment": self._environment}, output)
                while "pid" not in (answer := self._hear()) or "status" in answer:
                    assert "refused" not in answer, answer
        finally:
            os.close(output)
        return Fork(self, answer["pid"])

    def code_of(self, pid: int) -> int | None:
        """The exit code of a fork, None while it runs."""
        with self._lock:
            self._link.setblocking(False)
            try:
                while True:
                    self._hear()
            except BlockingIOError:
                return self._codes.get(pid)
            finally:
                self._link.settimeout(60)

    def close(self) -> None:
        """Its forks must have ended."""
        self._link.close()
        assert self._process.wait(20) == 0

    def _send(self, message: dict[str, object], *fds: int) -> None:
        socket.send_fds(self._link, [json.dumps(message).encode()], fds)

    def _hear(self) -> dict[str, Any]:
        data, fds, _, _ = socket.recv_fds(self._link, MESSAGE_BYTES, 1)
        assert data, "the nursery has ended"
        for fd in fds:  # a pidfd: pids do for tests
            os.close(fd)
        message: dict[str, Any] = json.loads(data)
        if "status" in message:
            self._codes[message["pid"]] = message["status"]
        return message


@contextmanager
def nursery(model: Path) -> Iterator[Nursery]:
    found = Nursery(model)
    try:
        yield found
    finally:
        found.close()


class NursedWorker(WorkerProcess):
    """A worker with a real model."""

    def __init__(self, nursery: Nursery, config: WorkerConfig, faults: str, folder: Path) -> None:
        self._nursery = nursery
        super().__init__(config, faults, folder)

    def _start(self, config: WorkerConfig | ApiConfig, faults: str) -> Fork:
        assert isinstance(config, WorkerConfig)
        return self._nursery.fork(config, faults, self.log_path)
