"""The nursery: a process that has imported what workers need and forks one on request.

`python -m prelay.nursery_process FD`, where FD is a SOCK_SEQPACKET socket to the supervisor; one JSON object each
message. First comes {"entry": "module:function", "modules": [...]}, and {"ready": true} goes back when they are
imported. Then, as often as wanted: {"id", "argv", "environment"} with the output pipe → {"id", "pid"} with a pidfd,
or {"id", "refused"}; and {"pid", "status"} when that process has ended, the status negative for a signal.

Nothing may run here but imports: a thread or a lock held at the fork would be a broken one in the worker.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from .pdeath import PR_SET_PDEATHSIG

PR_SET_NAME = 15
#: Longest message, in bytes; the kernel's default limit is lower.
MESSAGE_BYTES = 1 << 20
#: What a fresh interpreter does with signals, where it is not the kernel's default.
_HANDLERS: dict[int, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGPIPE: signal.SIG_IGN,
    signal.SIGXFSZ: signal.SIG_IGN,
}

Entry = Callable[[Sequence[str]], int]

_libc = ctypes.CDLL(None, use_errno=True)


class NurseryProcess:
    """Answers the supervisor at the other end of `link` until that end is closed."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._children: dict[int, int] = {}  # pidfd → pid
        self._poll = select.poll()
        self._poll.register(link, select.POLLIN)

    def run(self) -> None:
        order = json.loads(self._link.recv(MESSAGE_BYTES))
        entry = _preload(order["entry"], order["modules"])
        gc.collect()
        gc.freeze()  # a worker's collector would write to, and so copy, every page that is shared with us
        self._send({"ready": True})
        while True:
            for fd, _ in self._poll.poll():
                if fd in self._children:
                    self._reap(fd)
                elif not self._serve(entry):
                    return

    def _serve(self, entry: Entry) -> bool:
        data, fds, _, _ = socket.recv_fds(self._link, MESSAGE_BYTES, 1)
        if not data:
            return False
        request = json.loads(data)
        output = fds[0]
        try:
            pid, pidfd = self._fork(entry, request, output)
        except OSError as error:
            self._send({"id": request["id"], "refused": str(error)})
            return True
        finally:
            os.close(output)
        self._children[pidfd] = pid
        self._poll.register(pidfd, select.POLLIN)
        self._send({"id": request["id"], "pid": pid}, pidfd)
        return True

    def _fork(self, entry: Entry, request: dict[str, Any], output: int) -> tuple[int, int]:
        """Return the pid and a pidfd of a new worker. Raise OSError when there is none."""
        tasks = len(list(Path("/proc/self/task").iterdir()))
        if threading.active_count() != 1 or tasks != 1:
            raise OSError(f"{tasks} threads run in it, and a fork would take one of them")
        sys.stdout.flush()
        sys.stderr.flush()
        nursery = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(entry, request, output, nursery)
        try:
            return pid, os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise

    def _become(self, entry: Entry, request: dict[str, Any], output: int, nursery: int) -> NoReturn:
        """In the child: be the process that the supervisor would have started. Standard input is /dev/null here too."""
        code = 1
        try:
            _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != nursery:  # it died before we asked
                os._exit(1)
            os.setsid()
            os.dup2(output, 1)
            os.dup2(output, 2)
            self._link.close()
            for fd in (output, *self._children):
                os.close(fd)
            _reset_signals()
            os.environ.clear()
            os.environ.update(request["environment"])
            name_process(request["argv"][0])
            sys.argv = ["prelay", *request["argv"]]
            code = _exit_code(entry, request["argv"])
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code & 0xFF)

    def _reap(self, pidfd: int) -> None:
        self._poll.unregister(pidfd)
        pid = self._children.pop(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        self._send({"pid": pid, "status": os.waitstatus_to_exitcode(status)})

    def _send(self, message: dict[str, Any], *fds: int) -> None:
        socket.send_fds(self._link, [json.dumps(message).encode()], fds)


def name_process(role: str) -> None:
    """Show as `prelay-<role>` where processes are listed; the kernel keeps 15 bytes."""
    _libc.prctl(PR_SET_NAME, f"prelay-{role}".encode(), 0, 0, 0)


def _preload(entry: str, modules: list[str]) -> Entry:
    for module in modules:
        importlib.import_module(module)
    module, _, function = entry.partition(":")
    found: Entry = getattr(importlib.import_module(module), function)
    return found


def _reset_signals() -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        wanted = _HANDLERS.get(number, signal.SIG_DFL)
        if signal.getsignal(number) != wanted:
            signal.signal(number, wanted)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _exit_code(entry: Entry, argv: Sequence[str]) -> int:
    try:
        return entry(argv)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1


def main() -> None:
    name_process("nursery")
    with suppress(ConnectionError):  # the supervisor is gone, and so are we
        NurseryProcess(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
