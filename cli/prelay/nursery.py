"""Workers forked from a process that has imported torch already: a restart need not wait for imports.

The supervisor's side; what runs in the nursery is nursery_process.py. Whatever goes wrong with it, a worker is
started as a plain process.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from .child import ChildSpec, Process, start_plain
from .errors import CliError, NurseryUnavailable
from .nursery_process import MESSAGE_BYTES
from .roles import THREAD_VARIABLES

#: How our own command is run. -P: a file of the working directory must not stand in for a module.
PRELAY = (sys.executable, "-P", "-m", "prelay")
#: How long a fork may take, in seconds.
ANSWER_S = 20.0
#: How long after a worker's end its exit code may take to come through the nursery, in seconds.
STATUS_S = 1.0
#: Everything that a worker imports by the time it serves.
_MODULES = (
    "prelay.roles",
    "prelay.settings",
    "prelay_prefill.main",
    "prelay_decode.main",
    "prelay_unified.main",
    "prelay_engine.loading",
    "prelay_worker.real",
    "prelay_text.detokenizer",
    "prelay_text.fingerprint",
    "prelay_text.stops",
    "prelay_text.tokenizer",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
)


def modules_for(folder: Path) -> list[str]:
    """Return what to import for workers of the model in `folder`: the code of its architecture too, if known."""
    try:
        kind = str(json.loads((folder / "config.json").read_text())["model_type"]).replace("-", "_")
    except (OSError, ValueError, KeyError, TypeError):
        return list(_MODULES)
    found = importlib.util.find_spec("transformers")  # imports nothing
    assert found is not None
    assert found.origin is not None
    code = Path(found.origin).parent / "models" / kind / f"modeling_{kind}.py"
    return [*_MODULES, *([f"transformers.models.{kind}.modeling_{kind}"] if code.exists() else [])]


class Fork:
    """A process that the nursery forked, with what we use of asyncio's Process."""

    def __init__(self, pid: int, pidfd: int) -> None:
        """Take over `pidfd`: signals go through it, so they never reach another process with the same number."""
        self.pid = pid
        self._pidfd = pidfd
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(pidfd, self._on_end)

    @property
    def returncode(self) -> int | None:
        return self._code.result() if self._code.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    def send_signal(self, number: int, /) -> None:
        if self._code.done():
            raise ProcessLookupError
        signal.pidfd_send_signal(self._pidfd, number)

    def ended(self, code: int) -> None:
        if not self._code.done():
            self._code.set_result(code)
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)

    def _on_end(self) -> None:
        """The kernel says that it ended. A dead nursery cannot say how, and its death is SIGKILL for its children."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        loop.call_later(STATUS_S, self.ended, -signal.SIGKILL)


class Nursery:
    """The nursery of one fleet. A Supervisor keeps it running by `spec` and starts workers by `nursed` specs."""

    def __init__(
        self,
        environment: Mapping[str, str],
        modules: Sequence[str],
        warn: Callable[[str], None],
        entry: str = "prelay.main:main",
    ) -> None:
        """`environment` holds the thread counts: the thread pools read them once, when they are imported."""
        self._environment = environment
        self._order = {"entry": entry, "modules": list(modules)}
        self._warn = warn
        self._warned = ""
        self._why = "it has not been started"
        self._ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._link: socket.socket | None = None
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Fork]] = {}
        self._forks: dict[int, Fork] = {}

    def __repr__(self) -> str:
        return f"Nursery(ready={self._ready.done() and self._ready.result()}, forks={sorted(self._forks)})"

    def spec(self) -> ChildSpec:
        """The nursery process itself. It is no reason to end the service."""
        command = (sys.executable, "-P", "-m", "prelay.nursery_process")
        return ChildSpec("nursery", command, self._environment, launch=self._open, given_up=self._on_given_up)

    def nursed(self, spec: ChildSpec) -> ChildSpec:
        """Return `spec`, a `prelay` command, to be started by the nursery as soon as it can."""

        async def before() -> None:
            await asyncio.shield(self._ready)
            if spec.before_start is not None:
                await spec.before_start()

        return replace(spec, before_start=before, launch=self._launch)

    def close(self) -> None:
        """After the last stop."""
        if self._link is not None:
            self._lost()

    async def _launch(self, spec: ChildSpec, output: int) -> Process:
        try:
            return await self._fork(spec, output)
        except NurseryUnavailable as error:
            if self._warned != str(error):
                self._warned = str(error)
                self._warn(f"{spec.name} starts as a plain process, which takes longer; the nursery: {error}")
            return await start_plain(spec, output)

    async def _fork(self, spec: ChildSpec, output: int) -> Fork:
        if self._link is None or not self._ready.done() or not self._ready.result():
            raise NurseryUnavailable(self._why)
        if any(spec.environment.get(name) != self._environment.get(name) for name in THREAD_VARIABLES):
            raise NurseryUnavailable("it has another number of threads")
        assert spec.command[: len(PRELAY)] == PRELAY
        number = next(self._numbers)
        request = {"id": number, "argv": spec.command[len(PRELAY) :], "environment": dict(spec.environment)}
        asked = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            socket.send_fds(self._link, [json.dumps(request).encode()], [output])
            return await asyncio.wait_for(asked, ANSWER_S)
        except TimeoutError:
            raise NurseryUnavailable("it does not answer") from None
        except OSError as error:
            raise NurseryUnavailable(str(error)) from None
        finally:
            self._asked.pop(number, None)

    async def _open(self, spec: ChildSpec, output: int) -> Process:
        """Start the nursery process, with a new link to it."""
        if self._ready.done():
            self._ready = asyncio.get_running_loop().create_future()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                fd = theirs.fileno()
                process = await start_plain(replace(spec, command=(*spec.command, str(fd)), pass_fds=(fd,)), output)
            ours.setblocking(False)
            ours.send(json.dumps(self._order).encode())
        except BaseException:
            ours.close()
            raise
        self._link = ours
        asyncio.get_running_loop().add_reader(ours, self._on_message)
        return process

    def _on_message(self) -> None:
        assert self._link is not None
        try:
            data, fds, _, _ = socket.recv_fds(self._link, MESSAGE_BYTES, 1)
        except BlockingIOError:
            return
        except ConnectionError:
            data, fds = b"", []
        for fd in fds:
            os.set_inheritable(fd, False)
        match json.loads(data or b"null"):
            case None:
                self._lost()
            case {"ready": True}:
                self._ready.set_result(True)
            case {"id": number, "pid": pid}:
                self._on_forked(number, pid, fds[0])
            case {"id": number, "refused": why} if number in self._asked:
                self._asked[number].set_exception(NurseryUnavailable(why))
            case {"pid": pid, "status": code} if pid in self._forks:
                self._forks.pop(pid).ended(code)

    def _on_forked(self, number: int, pid: int, pidfd: int) -> None:
        asked = self._asked.get(number)
        if asked is None or asked.done():  # it was not waited for, and a plain process is in its place
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
            return
        self._forks[pid] = Fork(pid, pidfd)
        asked.set_result(self._forks[pid])

    def _lost(self) -> None:
        """The nursery has ended. Its workers do so too, each tells by itself; those to come wait for the next one.

        Only when it never got ready they do not: then the next may not either.
        """
        assert self._link is not None
        asyncio.get_running_loop().remove_reader(self._link)
        self._link.close()
        self._link = None
        self._forks = {}
        self._why = "it ended"
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(NurseryUnavailable(self._why))
        if not self._ready.done():
            self._why = "it ended before it was ready"
            self._ready.set_result(False)
        elif self._ready.result():
            self._ready = asyncio.get_running_loop().create_future()

    def _on_given_up(self, error: CliError) -> None:
        self._why = str(error).partition("\n")[0]
        if not self._ready.done():
            self._ready.set_result(False)
