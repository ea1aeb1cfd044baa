"""The state directory: one supervisor at a time, one server at a time, nobody else's eyes.

lock            held by the supervisor while it lives
server/         0700: the data, log and socket of the private server
server/lock     held by the supervisor *and* inherited by the server, so it is free only when no server
                can write there any more, however the supervisor ended
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
from pathlib import Path

from .errors import StateDirError

#: Longest path of a unix socket, in bytes (sun_path holds 108 with the final zero).
SOCKET_PATH_MAX = 107


class StateDir:
    """An opened and locked state directory."""

    def __init__(self, root: Path) -> None:
        """Create what is missing and take the supervisor's lock. Raise StateDirError."""
        self.root = root.absolute()
        self.server = self.root / "server"
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _open(self.root / "lock")
        except OSError as error:
            raise StateDirError(f"cannot use the state directory {root}: {_why(error, self.root)}") from None
        try:
            self._take()
            _private(self.server)
            self.socket = socket_path(self.root)
            self._runtime = self.socket.parent if self.socket.parent != self.server else None
            if self._runtime is not None:
                _private(self._runtime)
        except BaseException:
            os.close(self._lock)
            raise

    def _take(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._lock, 20, 0).decode(errors="replace").strip()
            raise StateDirError(
                f"the state directory {self.root} is in use by another prelay serve (pid {owner or 'unknown'});"
                " stop it, or use another --state-dir"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def open_server_lock(self) -> int:
        """Return an open descriptor of the server's lock, not locked yet. The caller closes it."""
        return _open(self.server / "lock")

    def close(self) -> None:
        """Remove the socket's fallback directory and give the lock back. Call it after the server has ended."""
        if self._runtime is not None:
            self.socket.unlink(missing_ok=True)
            self._runtime.rmdir()
        os.close(self._lock)


def socket_path(root: Path) -> Path:
    """Return where the server's socket of a state directory is, running or not. Raise StateDirError."""
    socket = root.absolute() / "server" / "redis.sock"
    return socket if len(os.fsencode(socket)) <= SOCKET_PATH_MAX else _runtime_dir(root.absolute()) / "redis.sock"


def holder(lock: Path) -> str | None:
    """Return who holds a lock: the pid that stands in it, or "unknown". None when it is free or not there.

    Raise OSError when it cannot be read.
    """
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        # Shared, and for the time of this look: only who starts within these microseconds is turned away.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(descriptor, 20, 0).decode(errors="replace").strip() or "unknown"
    finally:
        os.close(descriptor)
    return None


def _why(error: OSError, root: Path) -> str:
    """The system's words, or better ones where something that is no directory stands in the way."""
    if isinstance(error, FileExistsError | NotADirectoryError):
        for place in (root, *root.parents):
            if place.exists() and not place.is_dir():
                return f"{'it' if place == root else place} is a file, not a directory; name another --state-dir"
    return error.strerror or str(error)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _runtime_dir(root: Path) -> Path:
    """A short directory for the socket of a state directory with a long path; the same at every start."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    name = hashlib.sha256(os.fsencode(root)).hexdigest()[:12]
    folder = Path(base) / f"prelay-{os.getuid()}-{name}"
    if len(os.fsencode(folder / "redis.sock")) > SOCKET_PATH_MAX:
        raise StateDirError(
            f"the path of the state directory is too long for a socket ({SOCKET_PATH_MAX} bytes), and so is"
            f" {folder}: use a shorter --state-dir"
        )
    return folder


def _private(folder: Path) -> None:
    """Make a directory that only this user can enter, or check that it is one."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StateDirError(f"cannot use {folder}: {error.strerror}") from None
    check_private(folder)


def check_private(folder: Path) -> None:
    """Raise StateDirError unless it is a directory that only this user can enter."""
    try:
        found = folder.lstat()
    except OSError as error:
        raise StateDirError(f"cannot use {folder}: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise StateDirError(f"{folder} must be a directory of yours that nobody else can enter (chmod 700)")
