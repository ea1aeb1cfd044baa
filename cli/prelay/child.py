"""One supervised process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from .errors import CliError
from .pdeath import dying

#: Last lines kept of each child, for the message when it fails.
TAIL_LINES = 12
#: Longest line passed on, in bytes; the rest of a longer one becomes lines of its own.
LINE_BYTES = 8192

#: How long the output is read on after the process has ended, in seconds.
OUTPUT_GRACE_S = 1.0

Sink = Callable[[str, str], None]


class Process(Protocol):
    """What is used of a started process: asyncio's own, or one that somebody else forked for us."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int:
        """Return the exit code, negative for a signal. May be awaited by several, and cancelled."""

    def send_signal(self, number: int, /) -> None:
        """Raise ProcessLookupError when it has ended."""


async def start_plain(spec: ChildSpec, output: int) -> Process:
    """Start it from this thread, which must be the main one (see pdeath). Raise OSError."""
    return await asyncio.create_subprocess_exec(
        *dying(spec.death_signal, *spec.command),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=dict(spec.environment),
        pass_fds=spec.pass_fds,
        # Out of the terminal's group: Ctrl-C reaches the supervisor alone, which stops children in order.
        start_new_session=True,
    )


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run. `stop_s` is the time between SIGTERM and SIGKILL at an ordered stop, in seconds.

    `death_signal` is what it gets when the supervisor dies. `before_start` is awaited before each start, also a
    restart; a CliError from it ends the supervisor. `after_death` is awaited with the pid when it ended by
    itself. `pass_fds` are inherited. `last_words` says what a log of its own tells about a failure. `launch` starts
    the process, with the writing end of a pipe for its output. `given_up` hears that it is no longer restarted; where
    it is absent, that ends the supervisor.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    stop_s: float = 10.0
    death_signal: signal.Signals = signal.SIGKILL
    pass_fds: tuple[int, ...] = ()
    before_start: Callable[[], Coroutine[Any, Any, None]] | None = None
    last_words: Callable[[], str] | None = None
    after_death: Callable[[int], Coroutine[Any, Any, None]] | None = None
    launch: Callable[[ChildSpec, int], Awaitable[Process]] = start_plain
    given_up: Callable[[CliError], None] | None = None


class Child:
    """A running process. Its output goes line by line to `sink(name, line)`."""

    def __init__(self, spec: ChildSpec, process: Process, output: int, sink: Sink) -> None:
        """Take over the process and `output`, the reading end of a pipe. Use `start`."""
        self.spec = spec
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process = process
        self._sink = sink
        self._rest = b""
        self._output: int | None = output
        self._ended = asyncio.Event()
        os.set_blocking(output, False)
        asyncio.get_running_loop().add_reader(output, self._on_output)

    @classmethod
    async def start(cls, spec: ChildSpec, sink: Sink) -> Child:
        """Start it from the main thread. Raise OSError."""
        # A pipe of our own: asyncio's would let a grandchild that holds it keep the process from ending for us.
        output, into = os.pipe()
        try:
            process = await spec.launch(spec, into)
        except BaseException:
            os.close(output)
            raise
        finally:
            os.close(into)
        return cls(spec, process, output, sink)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for its end and for the last of its output. May be awaited by several, and cancelled."""
        code = await self._process.wait()
        with contextlib.suppress(TimeoutError):  # a grandchild may hold the pipe open
            await asyncio.wait_for(self._ended.wait(), OUTPUT_GRACE_S)
        self._close_output()
        return code

    def send(self, number: signal.Signals) -> None:
        """Signal it; nothing happens when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def stop(self) -> int:
        """SIGTERM, then SIGKILL after `stop_s`. Returns its exit code."""
        self.send(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self.wait(), self.spec.stop_s)
        except TimeoutError:
            self._sink(self.spec.name, f"did not stop within {self.spec.stop_s:g} s: killed")
            self.send(signal.SIGKILL)
            return await self.wait()

    def _on_output(self) -> None:
        assert self._output is not None
        try:
            chunk = os.read(self._output, LINE_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            self._close_output()
            return
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) >= LINE_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._line(line)

    def _close_output(self) -> None:
        if self._output is None:
            return
        asyncio.get_running_loop().remove_reader(self._output)
        os.close(self._output)
        self._output = None
        if self._rest:
            self._line(self._rest)
        self._ended.set()

    def _line(self, raw: bytes) -> None:
        line = raw.decode(errors="replace").rstrip("\r")
        self.tail.append(line)
        self._sink(self.spec.name, line)
