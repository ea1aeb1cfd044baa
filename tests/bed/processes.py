"""API and null worker processes of the tests' own, started from a configuration as the product starts them."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from prelay_api.config import ApiConfig
from prelay_batch.config import BatchConfig
from prelay_queue.settings import QueueSettings, QueueTimes
from prelay_worker.config import NullModel, Role, WorkerConfig

from .forks import Child, Fork, wait
from .http import get

#: The null model of most tests: it never ends by itself, and makes a token in a millisecond.
NULL = NullModel()


class Process:
    """A child with its output in a file. `stop` waits for its end, and says so when it does not end well."""

    #: How it is started: as a fork, which is quick.
    start: Callable[[ApiConfig | WorkerConfig | BatchConfig, str, Path], Child] = Fork

    def __init__(self, kind: str, config: ApiConfig | WorkerConfig | BatchConfig, faults: str = "") -> None:
        self.kind = kind
        self._log = tempfile.NamedTemporaryFile(prefix=f"bed-{kind}-", suffix=".log")  # noqa: SIM115 - see close
        self._said = ""
        self._process = type(self).start(config, faults, Path(self._log.name))

    def __repr__(self) -> str:
        return f"Process({self.kind}, pid={self.pid}, code={self.code})"

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def code(self) -> int | None:
        return self._process.exitcode

    @property
    def log(self) -> str:
        return self._said if self._log.closed else Path(self._log.name).read_text()

    def send(self, number: int) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):  # it may end at this very moment
                os.kill(self.pid, number)

    def wait(self, timeout_s: float = 15) -> int | None:
        """Wait for its end and return the exit code; None when it does not come."""
        wait(self._process, timeout_s)
        return self.code

    def kill(self) -> None:
        """SIGKILL, also for one that is stopped."""
        self.send(signal.SIGKILL)
        assert self.wait(10) is not None

    def stop(self, timeout_s: float = 15) -> int:
        """SIGTERM and wait for the exit code. One that stays is killed, and 137 is returned."""
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        code = self.wait(timeout_s)
        if code is None:
            self.kill()
            return 137
        return code

    def close(self) -> None:
        """End it and close its log, which can be read on."""
        self.stop()
        self._said = self.log
        self._log.close()

    def wait_for(self, pattern: str, timeout_s: float = 20) -> re.Match[str]:
        """Wait until the output has a match of `pattern`."""
        deadline = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.log)):
            if self.code is not None or time.monotonic() > deadline:
                raise AssertionError(f"{self!r} never said {pattern!r}:\n{self.log}")
            time.sleep(0.02)
        return found


class Api(Process):
    """An API process that serves; `url` is where."""

    def __init__(self, config: ApiConfig, faults: str = "") -> None:
        super().__init__("api", config, faults)
        self.url = ""

    def wait_until_it_serves(self) -> None:
        self.url = self.wait_for(r"serving \S+ on (http://\S+)")[1]
        self.wait_for("listening as")


class Fleet:
    """The processes of one test; `close` ends all that are left."""

    def __init__(self, queue: QueueSettings, model: Path) -> None:
        self.queue = queue
        self.model = model
        self.processes: list[Process] = []

    def api(self, faults: str = "", **changes: Any) -> Api:
        config = ApiConfig(self.queue, self.model, "null", port=0)
        api = Api(replace(config, **changes), faults)
        self.processes.append(api)
        api.wait_until_it_serves()
        return api

    def worker(
        self, role: Role, faults: str = "", null: NullModel = NULL, blocks: int = 4096, **changes: Any
    ) -> Process:
        config = WorkerConfig(role, self.queue, self.model, kv_blocks=blocks, null=null)
        process = Process(role, replace(config, **changes), faults)
        self.processes.append(process)
        process.wait_for("is ready")
        return process

    def batch_worker(self, files_dir: Path, faults: str = "", **changes: Any) -> Process:
        config = BatchConfig(self.queue, "", self.model, "null", files_dir)
        process = Process("batch", replace(config, **changes), faults)
        self.processes.append(process)
        process.wait_for("is ready")
        return process

    def close(self) -> None:
        """End all: the API first, as the supervisor does."""
        for process in self.processes:
            process.close()


@contextlib.contextmanager
def fleet(queue: QueueSettings, model: Path) -> Iterator[Fleet]:
    """A fleet that is ended in any case. What its processes said is shown with a failure."""
    found = Fleet(queue, model)
    try:
        yield found
    except BaseException:
        for process in found.processes:
            print(f"--- {process!r}\n{process.log}")
        raise
    finally:
        found.close()


@contextlib.contextmanager
def again_and_again(every_s: float, work: Callable[[], object]) -> Iterator[None]:
    """Do `work` in a thread all the time."""
    stopping = threading.Event()

    def run() -> None:
        while not stopping.wait(every_s):
            work()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


def until(what: Callable[[], Any], timeout_s: float = 15, every_s: float = 0.02) -> Any:
    """Wait until `what` returns something true, and return it."""
    deadline = time.monotonic() + timeout_s
    while not (found := what()):
        if time.monotonic() > deadline:
            raise AssertionError(f"never became true: {what} (last: {found!r})")
        time.sleep(every_s)
    return found


def until_ready(url: str, timeout_s: float = 20) -> None:
    """Wait until the API says that a request would be served."""
    until(lambda: get(f"{url}/health/ready").status_code == 200, timeout_s)


def fast_times(**changes: int) -> QueueTimes:
    """Times of the protocol for tests that wait for a lease to end: a second where the product waits ten."""
    times = QueueTimes(lease_ms=1_500, renew_ms=400, heartbeat_ms=300, pending_idle_ms=1_000, preempt_grace_ms=800)
    return replace(times, sweep_ms=300, queued_check_ms=1_000, **changes)


def new_fleet_name() -> str:
    return secrets.token_hex(6)
