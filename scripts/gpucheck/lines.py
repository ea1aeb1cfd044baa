"""A child process that is asked in lines of JSON, and answers in such."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class Silent(Exception):  # noqa: N818 - reads as the fact it states
    """The child has ended, or says nothing."""


class Asked:
    """The parent's side. Not thread-safe."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=dict(environment), stdin=pipe, stdout=pipe)
        self._rest = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, message: Any) -> None:
        """Silent when it has ended."""
        try:
            self._input.write(json.dumps(message).encode() + b"\n")
            self._input.flush()
        except OSError:
            raise Silent(self._ending()) from None

    def hear(self, until: float) -> Any:
        """The next message. Silent when none comes before this moment of the monotonic clock, or it has ended."""
        while b"\n" not in self._rest:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._output], [], [], left)[0]:
                raise Silent("it did not answer in time")
            more = os.read(self._output.fileno(), 1 << 16)
            if not more:
                raise Silent(self._ending())
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def kill(self) -> None:
        """SIGKILL, and return when it is gone."""
        self._process.kill()
        self.close()

    def close(self, wait_s: float = 20.0) -> None:
        """Let it end by itself; kill it if it does not."""
        with contextlib.suppress(OSError):
            self._input.close()
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()

    def _ending(self) -> str:
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            return "it closed its output and did not end"
        return f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"

    @property
    def _input(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def _output(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout


class Answers:
    """The child's side. What others print in this process goes to stderr from now on."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        self._output = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def asked(self) -> Iterator[Any]:
        """What the parent asks, until it closes."""
        for line in sys.stdin:
            yield json.loads(line)

    def say(self, message: Any) -> None:
        self._output.write(json.dumps(message) + "\n")
        self._output.flush()
