"""Run a command that dies with the process that started it: `python pdeath.py SIGNAL PARENT COMMAND...`

A program of its own, run by path with no other import of ours, because the request must be made in the child:
after fork in a threaded process nothing but exec is safe, so subprocess's preexec_fn is no place for it. The
kernel keeps the setting across exec. The signal comes when the *thread* that started this program ends:
supervisors start children from their main thread.
"""

from __future__ import annotations

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1


def dying(death_signal: int, *command: str) -> list[str]:
    """The command that runs `command` so that it gets `death_signal` when this process dies."""
    return [sys.executable, "-I", "-S", __file__, str(int(death_signal)), str(os.getpid()), *command]


def main() -> None:
    death_signal, parent, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it died before we asked
        sys.exit(1)
    try:
        os.execv(command[0], command)  # noqa: S606 - no shell is the point
    except OSError as error:
        sys.exit(f"cannot run {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
