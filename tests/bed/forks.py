"""Processes forked from a server that has imported everything: they start in milliseconds."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Protocol

from prelay_api.config import ApiConfig
from prelay_batch.config import BatchConfig
from prelay_worker.config import WorkerConfig
from tests.bed.child import encode, serve_forked

ROOT = Path(__file__).parents[2]

#: Starting a process polls all others of this interpreter: with fleets in several threads an exit code would be lost.
_lock = threading.RLock()
_context = multiprocessing.get_context("forkserver")
#: The server belongs to this whole process, and reads the list when it makes its first fork: there is only this one.
_context.set_forkserver_preload(
    ["tests.bed.child", *(f"prelay_{part}.main" for part in ("prefill", "decode", "unified", "batch", "api"))]
)


class Child(Protocol):
    """What is asked of a started process."""

    @property
    def pid(self) -> int | None: ...
    @property
    def exitcode(self) -> int | None: ...


class Fork:
    """A child of the fork server."""

    def __init__(self, config: WorkerConfig | ApiConfig | BatchConfig, faults: str, log: Path) -> None:
        entry = "api" if isinstance(config, ApiConfig) else "batch" if isinstance(config, BatchConfig) else "worker"
        self._process = _context.Process(target=serve_forked, args=(encode(config), faults, str(log), entry))
        with _lock:
            self._process.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        """None while it runs, -9 after a SIGKILL."""
        with _lock:
            return self._process.exitcode


class Spawned:
    """A new interpreter, for tests whose environment has to be there before anything is imported."""

    def __init__(self, config: WorkerConfig | ApiConfig | BatchConfig, faults: str, log: Path) -> None:
        entry = "api" if isinstance(config, ApiConfig) else "worker"
        command = [sys.executable, "-m", "tests.bed.child", entry, encode(config)]
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=out, env=os.environ | {"PRELAY_FAULTS": faults}, cwd=ROOT
            )

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()


def wait(child: Child, timeout_s: float) -> bool:
    """Wait for its end; False when it does not come."""
    deadline = time.monotonic() + timeout_s
    while child.exitcode is None and time.monotonic() < deadline:
        time.sleep(0.03)
    return child.exitcode is not None
