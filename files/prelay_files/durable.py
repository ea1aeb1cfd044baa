"""Writing so that it stays: after these calls return, a power cut takes nothing back."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from .errors import StorageFailed


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Whatever the disk refuses becomes StorageFailed, one line."""
    try:
        yield
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise StorageFailed(f"the disk does not take it: {error.strerror or error}{where}") from None


def make_folder(path: Path) -> None:
    """Make a folder that only its owner may look into, and those above it."""
    if not path.is_dir():
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make what was renamed or removed in the folder last."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_file(path: Path) -> None:
    """Make last what another process has written."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace(path: Path, content: bytes) -> None:
    """Make `content` the file's content: all of it or what was there before."""
    temporary = _written_beside(path, content)
    try:
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_once(path: Path, content: bytes) -> bool:
    """Write a file that is not there yet; False: it is there, and stays as it is."""
    temporary = _written_beside(path, content)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return True


def hold(path: Path) -> int | None:
    """The file, made if need be and locked; None: somebody has it. The kernel lets go of it when its process dies."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.stat().st_ino == os.fstat(handle).st_ino:  # else it was swept before we had it
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(handle)
    return None


def _written_beside(path: Path, content: bytes) -> Path:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(handle, "wb") as file:  # noqa: PTH123 - a handle, not a path
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary
