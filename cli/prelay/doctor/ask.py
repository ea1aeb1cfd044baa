"""Programs that are asked something and may hang: an answer comes in time, whatever becomes of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

#: How long a program that was killed is waited for, in seconds. One that hangs in a driver cannot even be killed.
_KILLED_S = 1.0


@dataclass(frozen=True, slots=True)
class Said:
    """What a program said. `code` is its exit code, less than 0 for a signal, or None when it took too long."""

    code: int | None
    output: str
    errors: str

    def last_words(self) -> str:
        """The last line of its errors, "" when there is none."""
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        return lines[-1][:200] if lines else ""


def ask(command: Sequence[str], limit_s: float) -> Said:
    """Run it for at most `limit_s` seconds; what it has said until then counts. OSError when it cannot be started.

    Its children end with it when it takes too long. Its output goes to files: a pipe is open for as long as anybody has
    it, and a program in the depths of a driver has it for ever.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(  # a session of its own, so that its children can be found
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
        )
        code = None
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if code is None:
                _end(process)
        return Said(code, *(_read(file.fileno()) for file in (output, errors)))


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED_S)


def _read(descriptor: int) -> str:
    """From the beginning, wherever the program is that may be writing still."""
    return os.pread(descriptor, 1 << 20, 0).decode(errors="replace")
