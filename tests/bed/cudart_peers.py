"""The peers of cudart_peer.py, as a test has them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from prelay_kv.ref import KvRef
from tests.bed.servers import die_with_parent


class Peers:
    """The process that forks peers, as a test has it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.bed.cudart_peer", str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], preexec_fn=die_with_parent, cwd=Path(__file__).parents[2]
            )
        self._link = ours
        self._link.settimeout(60)

    def ask(self, message: object, fds: Sequence[int] = ()) -> int:
        socket.send_fds(self._link, [orjson.dumps(message)], fds)
        return int(self._link.recv(100))

    def close(self) -> None:
        self._link.close()
        assert self._process.wait(20) == 0


class Refused(Exception):  # noqa: N818 - what a peer said
    """A peer's command failed with the error of this name."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name


class Peer:
    """A running peer. `environment` is added to what the test's own process has."""

    def __init__(self, peers: Peers, library: Path, shm_dir: Path, **environment: str) -> None:
        self._peers = peers
        self._code: int | None = None
        ours, theirs = socket.socketpair()
        fake = {name: value for name, value in os.environ.items() if name.startswith("FAKE_CUDART_")}
        start = {"library": str(library), "shm_dir": str(shm_dir), "environment": fake | environment}
        with theirs:
            self.pid = peers.ask(start, [theirs.fileno()])
        ours.settimeout(60)
        self._link = ours
        self._lines = ours.makefile("rwb")

    def ask(self, *command: str) -> Any:
        self._lines.write(orjson.dumps(command) + b"\n")
        self._lines.flush()
        line = self._lines.readline()
        assert line, f"the peer ended with {self.wait()}"
        said = orjson.loads(line)
        if "error" in said:
            raise Refused(said["error"], said["text"])
        return said["ok"]

    def export(self, owner: str) -> None:
        self._take(self.ask("export", owner))

    def refill(self) -> None:
        self._take(self.ask("refill"))

    def _take(self, said: dict[str, Any]) -> None:
        self.ref = KvRef.decode(said["ref"].encode())
        self.digests: list[str] = said["digests"]

    def wait(self) -> int:
        """Its exit code, when it has ended."""
        if self._code is None:
            self._code = self._peers.ask(self.pid)
        return self._code

    def kill(self) -> None:
        """SIGKILL, and return when the process is gone."""
        os.kill(self.pid, signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL

    def end(self) -> None:
        """Let it come to its end, if it has not."""
        self._lines.close()
        self._link.close()
        self.wait()
