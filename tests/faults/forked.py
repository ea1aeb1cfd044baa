"""Processes of a fault test, forked from a server that has imported everything: they start in milliseconds."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
from abc import ABC, abstractmethod
from pathlib import Path

from prelay_api.config import ApiConfig
from prelay_worker.config import WorkerConfig
from tests.bed.forks import Child, Fork, wait

_numbers = itertools.count()


class Forked(ABC):
    """One process and what it says."""

    def __init__(self, kind: str, config: WorkerConfig | ApiConfig, faults: str, folder: Path) -> None:
        self.frozen_at: float | None = None
        self._told = False
        self._said: dict[str, str] = {}
        self.role = kind
        self.log_path = folder / f"{kind}-{next(_numbers)}.log"
        self._process = self._start(config, faults)

    def _start(self, config: WorkerConfig | ApiConfig, faults: str) -> Child:
        return Fork(config, faults, self.log_path)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.log_path.stem}, pid={self.pid}, code={self.code})"

    @property
    @abstractmethod
    def id(self) -> str:
        """Its incarnation, "" before it is ready."""

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def code(self) -> int | None:
        return self._process.exitcode

    @property
    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    def said(self, pattern: str) -> str:
        """The first group of the first match of `pattern` in the output, "" before it is said. Asked for often."""
        if pattern not in self._said and (found := re.search(pattern, self.log)):
            self._said[pattern] = found[1]
        return self._said.get(pattern, "")

    @property
    def frozen(self) -> bool:
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except (FileNotFoundError, ProcessLookupError):
            return False

    def send(self, number: int) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):  # it may end at this very moment
                os.kill(self.pid, number)

    def struck(self, point: str) -> bool:
        """Did the fault at this point happen?"""
        return f"failpoint {point}: " in self.log

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; False when it does not come."""
        return wait(self._process, timeout_s)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        assert self.wait(10)

    def end(self) -> None:
        """Tell it to end, once: a second SIGTERM may come when Python has already let go of the signal."""
        if not self._told:
            self._told = True
            self.send(signal.SIGTERM)
            self.send(signal.SIGCONT)

    def stop(self, timeout_s: float = 30) -> int | None:
        """SIGTERM, wait, and return the exit code; one that stays is killed, and None is returned."""
        self.end()
        if not self.wait(timeout_s):
            self.send(signal.SIGUSR1)  # faulthandler says where it stands
            self.wait(1)
            self.kill()
            return None
        return self.code


class WorkerProcess(Forked):
    """One worker process."""

    def __init__(self, config: WorkerConfig, faults: str, folder: Path) -> None:
        self.config = config
        super().__init__(config.role, config, faults, folder)

    @property
    def id(self) -> str:
        return self.said(r"worker (\S+) is ready")


class ApiProcess(Forked):
    """One API process. `url` is where it serves, "" before it does."""

    def __init__(self, config: ApiConfig, faults: str, folder: Path) -> None:
        self.config = config
        super().__init__("api", config, faults, folder)

    @property
    def url(self) -> str:
        return self.said(r"serving \S+ on (http://\S+)")

    @property
    def id(self) -> str:
        return self.said(r"listening as (\S+)")
