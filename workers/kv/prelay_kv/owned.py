"""A pool's file in the hands of its owner."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .checks import need_text
from .errors import ShmTooSmall
from .layout import KvLayout
from .segment import Segment, domain
from .shmfile import Header, Parts, create_locked, is_held, pack_header


class OwnedFile:
    """A file that this process has made, locked and mapped, its whole memory reserved: no write can fail later."""

    def __init__(self, fd: int, path: Path, layout: KvLayout, parts: Parts, owner: str) -> None:
        """Take over the locked file `fd`, already at its full size. Use `create`."""
        self._fd: int | None = fd
        self._memory: mmap.mmap | None = mmap.mmap(fd, parts.nbytes)
        self._layout = layout
        self._parts = parts
        self._owner = owner
        self.path = path

    @classmethod
    def create(cls, owner: str, layout: KvLayout, parts: Parts, shm_dir: Path) -> OwnedFile:
        """ShmTooSmall when `shm_dir` has no room for `parts`; OSError when it cannot be written."""
        need_text("owner", owner)
        _refuse_if_short(shm_dir, parts.nbytes)
        fd, path = create_locked(shm_dir, owner)
        try:
            _reserve(fd, parts.nbytes, shm_dir)
            return cls(fd, path, layout, parts, owner)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise

    @property
    def closed(self) -> bool:
        return self._fd is None

    def held(self) -> bool:
        """Whether anybody has said that it has the blocks mapped; see shmfile.hold. True when that cannot be told."""
        try:
            return self._fd is not None and is_held(self._fd)
        except OSError:
            return True

    @property
    def memory(self) -> mmap.mmap:
        assert self._memory is not None, "closed"
        return self._memory

    def generations(self) -> npt.NDArray[np.uint64]:
        """The table, as a view of the file."""
        return np.frombuffer(
            self.memory, dtype=np.uint64, count=self._layout.num_blocks, offset=self._parts.generations
        )

    def write_header(self, header: Header) -> None:
        page = pack_header(header)
        self.memory[: len(page)] = page

    def segment(self, kind: str, device: str, offset: int) -> Segment:
        """The segment whose handle is this file's name."""
        return Segment(
            node=domain(self.path.parent),
            owner=self._owner,
            device=device,
            kind=kind,
            handle=self.path.name,
            offset=offset,
            nbytes=self._layout.nbytes,
            layout_hash=self._layout.layout_hash,
            numerics_hash=self._layout.numerics_hash,
        )

    def unlink(self) -> None:
        """Keep newcomers out. What is open or mapped stays."""
        self.path.unlink(missing_ok=True)

    def close(self, unlink: bool = True) -> None:
        """Give the file up; a second call does nothing. Its memory goes with the last view of it."""
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        self._memory = None
        if unlink:  # while the lock is held: a sweep that looks now leaves the file alone
            self.unlink()
        fcntl.flock(fd, fcntl.LOCK_UN)  # views that are still held share this lock through the mapping's descriptor
        os.close(fd)


def _refuse_if_short(shm_dir: Path, needed: int) -> None:
    """Ask first: filling the folder up before giving in could starve the others in it."""
    space = os.statvfs(shm_dir)
    total, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    if total and needed > free:  # a tmpfs without a limit says 0 of 0
        raise ShmTooSmall(str(shm_dir), needed, free, total)


def _reserve(fd: int, needed: int, shm_dir: Path) -> None:
    """Give the file its pages now; without them a write to a full tmpfs kills the process with SIGBUS."""
    try:
        os.posix_fallocate(fd, 0, needed)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
    else:
        return
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)  # so that the message does not count what was just taken
    space = os.statvfs(shm_dir)
    raise ShmTooSmall(str(shm_dir), needed, space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize)
