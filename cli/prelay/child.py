"""One supervised process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import pdeath

#: Last lines kept of each child, for the message when it fails.
TAIL_LINES = 12
#: Longest line passed on, in bytes; the rest of a longer one becomes lines of its own.
LINE_BYTES = 8192

Sink = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run. `stop_s` is the time between SIGTERM and SIGKILL at an ordered stop, in seconds.

    `death_signal` is what it gets when the supervisor dies. `before_start` is awaited before each start, also a
    restart; a CliError from it ends the supervisor. `pass_fds` are inherited. `last_words` says what a log of
    its own tells about a failure.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    stop_s: float = 10.0
    death_signal: signal.Signals = signal.SIGKILL
    pass_fds: tuple[int, ...] = ()
    before_start: Callable[[], Coroutine[Any, Any, None]] | None = None
    last_words: Callable[[], str] | None = None


class Child:
    """A running process. Its output goes line by line to `sink(name, line)`."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process, sink: Sink) -> None:
        self.spec = spec
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process = process
        self._sink = sink
        self._pump = asyncio.create_task(self._pump_output())

    @classmethod
    async def start(cls, spec: ChildSpec, sink: Sink) -> Child:
        """Start it from this thread, which must be the main one (see pdeath). Raise OSError."""
        shim = [sys.executable, "-I", "-S", str(Path(pdeath.__file__)), str(int(spec.death_signal)), str(os.getpid())]
        process = await asyncio.create_subprocess_exec(
            *shim,
            *spec.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(spec.environment),
            pass_fds=spec.pass_fds,
            # Out of the terminal's group: Ctrl-C reaches the supervisor alone, which stops children in order.
            start_new_session=True,
        )
        return cls(spec, process, sink)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for its end and for the last of its output. May be awaited by several, and cancelled."""
        code = await self._process.wait()
        # A grandchild may hold the pipe open: the process is what counts.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._pump), 1.0)
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

    async def _pump_output(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        rest = b""
        while chunk := await stream.read(LINE_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) >= LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._line(line)
        if rest:
            self._line(rest)

    def _line(self, raw: bytes) -> None:
        line = raw.decode(errors="replace").rstrip("\r")
        self.tail.append(line)
        self._sink(self.spec.name, line)
