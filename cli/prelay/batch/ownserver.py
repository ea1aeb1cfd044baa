"""A `prelay serve` for the time of one run."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread

from ..errors import ChildFailed
from ..pdeath import dying
from ..restart import describe

#: Last lines kept of it, for the message when it fails.
TAIL_LINES = 12
#: Longest time for its ordered stop, seconds; it has shorter ones for each of its parts.
STOP_S = 90.0

#: Between the name of one of its parts and what that says.
CHILD = " │ "
_READY = re.compile(r"ready on (http://\S+)")


class OwnServer:
    """A running server that belongs to this process, and dies with it."""

    def __init__(self, arguments: Sequence[str], tell: Callable[[str], None]) -> None:
        """Start it. `arguments` go to prelay serve, and win over what is chosen here; `tell` hears what it says."""
        command = (sys.executable, "-P", "-m", "prelay", "serve", "--port", str(free_port()), *arguments)
        self.url = ""
        self._tell = tell
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._known = Event()
        self._process = subprocess.Popen(
            # Its own supervisor stops its parts in order, so it is asked, and not killed.
            dying(signal.SIGTERM, *command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the run, which stops it afterwards
        )
        self._reader = Thread(target=self._read, name="output of prelay serve", daemon=True)
        self._reader.start()

    def wait_ready(self) -> str:
        """Return its URL. Raise ChildFailed when it ends instead, with its last lines."""
        while not self._known.wait(0.2):
            self.check()
        self.check()
        return self.url

    def check(self) -> None:
        """Raise ChildFailed when it has ended."""
        if (code := self._process.poll()) is not None:
            self._reader.join(2)
            raise ChildFailed(f"prelay serve ended with {describe(code)}", tuple(self._tail))

    def stop(self) -> None:
        """Stop it in order; kill it when that takes too long. Its parts die with it."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(5)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                text = line.rstrip()
                self._tail.append(text)
                if not self.url and (found := _READY.search(text)):
                    self.url = found[1]
                    self._known.set()
                if not self.url:
                    self._tell(text)


def free_port() -> int:
    """Return a port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def own_server(arguments: Sequence[str], tell: Callable[[str], None]) -> Iterator[OwnServer]:
    """Start one, wait until it serves, and stop it in order at the end."""
    server = OwnServer(arguments, tell)
    try:
        server.wait_ready()
        yield server
    finally:
        tell("stopping")
        server.stop()
