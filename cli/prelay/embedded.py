"""The private Redis-compatible server of `prelay serve`.

It listens on a unix socket in a directory that nobody else can enter, keeps its data there (AOF, one fsync a
second), never evicts, and ends with the supervisor, however that ends. Only one can write a state directory:
the server inherits the lock that says so (statedir.py).
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, RedisError
from redis.retry import Retry

from .binaries import ServerBinary, find_server
from .child import Child, ChildSpec
from .errors import ServerError, StateDirError
from .statedir import StateDir

#: Ceiling of the server's memory, in bytes; a quarter of the machine where that is less.
MAXMEMORY = 2 << 30
#: How long an earlier server may take to end before it is asked to, and then before we give up. Seconds.
ORPHAN_PATIENCE_S = 2.0
ORPHAN_END_S = 20.0
#: A server that does not answer at all for so long will not. Loading a large AOF has no limit. Seconds.
ANSWER_S = 30.0
#: The log is set aside at the start when it is larger, in bytes.
LOG_BYTES = 4 << 20
#: Says which server wrote the data beside it.
RECORD = "server.json"


class EmbeddedServer:
    """The server of one state directory. Holds the server's lock from `open` to `close`."""

    def __init__(self, state: StateDir, memory: int) -> None:
        """Choose a program that can read what is there. `memory` is the machine's, in bytes. Raise ServerError."""
        self.state = state
        self._record = state.server / RECORD
        self.binary: ServerBinary = find_server(written_by(state.server))
        self._maxmemory = min(memory // 4, MAXMEMORY)
        self._lock = state.open_server_lock()
        self.log = state.server / "server.log"

    def __repr__(self) -> str:
        return f"EmbeddedServer({self.binary}, {self.state.socket})"

    @property
    def url(self) -> str:
        return f"unix://{quote(str(self.state.socket))}"

    def spec(self) -> ChildSpec:
        return ChildSpec(
            name="server",
            command=tuple(self._command()),
            environment={"PATH": os.defpath, "LC_ALL": "C"},
            stop_s=10.0,
            # Not SIGKILL: on SIGTERM it syncs the AOF first, and is gone within milliseconds all the same.
            death_signal=signal.SIGTERM,
            pass_fds=(self._lock,),
            before_start=self._prepare,
            last_words=self.last_words,
        )

    def _command(self) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self.state.socket),
            "unixsocketperm": "700",
            "dir": str(self.state.server),
            "save": "",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "maxmemory": str(self._maxmemory),
            "maxmemory-policy": "noeviction",
            "logfile": str(self.log),
            "daemonize": "no",
        }
        return [str(self.binary.path), *(word for name, value in options.items() for word in (f"--{name}", value))]

    async def _prepare(self) -> None:
        """Before each start: make sure that no server writes here, then clear away what a dead one left."""
        await self._take_lock()
        self.state.socket.unlink(missing_ok=True)
        if self.log.exists() and self.log.stat().st_size > LOG_BYTES:
            self.log.replace(self.log.with_suffix(".log.1"))
        self._record.write_text(json.dumps({"kind": self.binary.kind, "version": self.binary.version}))

    async def _take_lock(self) -> None:
        """Wait for the server of a supervisor that died: it was told to end by the kernel."""
        begun, asked = time.monotonic(), False
        while not self._try_lock():
            waited = time.monotonic() - begun
            if waited > ORPHAN_PATIENCE_S and not asked:
                asked = True
                await asyncio.to_thread(self._ask_to_end)
            if waited > ORPHAN_END_S:
                raise StateDirError(f"an earlier server still runs in {self.state.server} and does not end; stop it")
            await asyncio.sleep(0.02)

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _ask_to_end(self) -> None:
        client = self._client()
        try:
            client.shutdown(nosave=True)
        except RedisError:
            pass  # gone by itself, or deaf: the lock tells
        finally:
            client.close()

    def _client(self) -> redis.Redis:
        return redis.Redis(
            unix_socket_path=str(self.state.socket), socket_timeout=2, retry=Retry(NoBackoff(), 0), protocol=2
        )

    async def wait_ready(self, child: Callable[[], Child | None], tell: Callable[[str], None]) -> None:
        """Wait until it answers and has loaded its data. `child` is the process now running.

        Raise ServerError with the log's last line when it has ended or does not answer.
        """
        begun = time.monotonic()
        while True:
            process = child()
            # Before ours is started, whoever answers is an orphan that is about to end.
            state = await asyncio.to_thread(self._ping) if process is not None else "silent"
            if state == "ready":
                return
            if state == "loading":
                begun = time.monotonic()
                tell("server: loading its data")
            if process is None:
                begun = time.monotonic()  # `_take_lock` has a limit of its own
            elif process.returncode is not None:
                raise ServerError(f"{self.binary} ended at once: {self.last_words()}")
            if time.monotonic() - begun > ANSWER_S:
                raise ServerError(f"{self.binary} does not answer after {ANSWER_S:g} s: {self.last_words()}")
            await asyncio.sleep(0.02)

    def _ping(self) -> str:
        client = self._client()
        try:
            client.ping()
        except BusyLoadingError:
            return "loading"
        except RedisError:
            return "silent"
        finally:
            client.close()
        return "ready"

    def has_socket(self) -> bool:
        """Whether a new connection finds it. True also where its directory is gone: a restart would not help then."""
        return self.state.socket.exists() or not self.state.server.is_dir()

    def last_words(self) -> str:
        """Return the last line of the server's log that is not a greeting, and where the log is."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return "it left no log"
        return f"{lines[-1].partition(' # ')[2] or lines[-1] if lines else 'its log is empty'} (see {self.log})"

    def close(self) -> None:
        """Give the lock back, after the process has ended."""
        self.state.socket.unlink(missing_ok=True)
        os.close(self._lock)


def written_by(folder: Path) -> tuple[str, tuple[int, ...]] | None:
    """Return which server, and of which version, wrote the data in a `server` folder; None where there is none."""
    try:
        if not (folder / "appendonlydir").exists():
            return None
        record = json.loads((folder / RECORD).read_text())
        return str(record["kind"]), tuple(int(part) for part in record["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
