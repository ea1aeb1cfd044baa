"""KV segments in /dev/shm, for the supervisor: it must stay small, so nothing here may import torch (a test looks)."""

from __future__ import annotations

import fcntl
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from prelay_kv.sweep import still_mapped, sweep

from .host import SHM


@dataclass(frozen=True, slots=True)
class Segments:
    """The segment files of a folder, with their bytes on disk.

    Owned by a living worker, left by a dead one, or closed to us: another user's, or no plain file.
    """

    used: dict[str, int]
    left: dict[str, int]
    closed: dict[str, int]


def segment_files(folder: Path = SHM) -> list[Path]:
    """Return all segment files, of the living and the dead."""
    return sorted(folder.glob("prelay-*.kv"))


def sweep_segments(folder: Path = SHM) -> tuple[str, ...]:
    """Remove the segments whose owners are dead, and return their names. Those in use are left alone."""
    return sweep(folder)


def mapped_segments(folder: Path = SHM) -> tuple[str, ...]:
    """Return the segments of dead workers whose memory living ones have mapped still."""
    return still_mapped(folder)


def look_at_segments(folder: Path = SHM) -> Segments:
    """Tell the living from the dead by their locks, changing nothing."""
    found = Segments({}, {}, {})
    for path in segment_files(folder):
        try:
            _file_under(path, found)
        except FileNotFoundError:
            continue  # swept, or closed by its owner, meanwhile
        except OSError:
            found.closed[path.name] = 0
    return found


def _file_under(path: Path, found: Segments) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        nbytes = status.st_blocks * 512
        if not stat.S_ISREG(status.st_mode):
            found.closed[path.name] = nbytes
            return
        # Shared: beside a sweep or a starting owner it takes nothing away for longer than this look.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        found.used[path.name] = nbytes
    else:
        found.left[path.name] = nbytes
    finally:
        os.close(descriptor)
