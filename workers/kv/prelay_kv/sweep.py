"""Removing what dead owners left. Imports no torch, so that a supervisor may call it."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from .segment import SHM_DIR
from .shmfile import is_held, try_lock


def sweep(shm_dir: Path = SHM_DIR) -> tuple[str, ...]:
    """Remove the pools whose owners are dead; the names removed. Safe beside other sweeps and starting owners."""
    return tuple(path.name for path in sorted(shm_dir.glob("prelay-*.kv")) if _remove_if_free(path))


def still_mapped(shm_dir: Path = SHM_DIR) -> tuple[str, ...]:
    """The pools of dead owners whose blocks somebody has mapped: on a GPU such memory is not free yet."""
    return tuple(path.name for path in sorted(shm_dir.glob("prelay-*.kv")) if _is_left_mapped(path))


def _is_left_mapped(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # a sweep finds it taken for no longer than this look
        return is_held(fd)
    except OSError:
        return False
    finally:
        os.close(fd)


def _remove_if_free(path: Path) -> bool:
    try:  # O_NONBLOCK: a pipe of that name must not hold the sweep up
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # gone meanwhile, a link, or another user's
        return False
    try:
        mine = os.fstat(fd)
        if not stat.S_ISREG(mine.st_mode) or not try_lock(fd):
            return False
        # The lock may have come free because another sweep, or the owner, has just removed the file.
        if not os.path.samestat(mine, path.stat(follow_symlinks=False)):
            return False
        path.unlink()
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
