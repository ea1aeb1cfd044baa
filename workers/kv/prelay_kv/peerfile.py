"""A peer's pool file, as a reader maps it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np

from .errors import BadKvRef, NoAccess, SegmentGone
from .ref import KvRef
from .shmfile import PAGE, Header, Parts, hold, is_name, let_go, read_header


class PeerFile:
    """A file of a pool, mapped read-only. It stays readable when the owner dies and the file is removed."""

    def __init__(self, fd: int, memory: mmap.mmap, header: Header, ref: KvRef, parts: Parts) -> None:
        """Take over `fd`. Use `open`."""
        self._fd: int | None = fd
        self._held = False
        self._memory: mmap.mmap | None = memory
        self._segment = ref.segment
        self._layout = ref.layout
        self._nbytes = parts.nbytes
        self.header = header
        self._table = np.frombuffer(memory, dtype=np.uint64, count=ref.layout.num_blocks, offset=parts.generations)

    @classmethod
    def open(cls, ref: KvRef, parts: Parts, shm_dir: Path, may_write: bool = False) -> PeerFile:
        """Map the file that `ref` names in `shm_dir`.

        With `may_write` the mapping, read-only as ever, can be made writable later if the file's mode allows that.
        SegmentGone when it is not there; NoAccess when it cannot be opened; BadKvRef when its name, its size or its
        header's owner and layout are not what `ref` and `parts` say.
        """
        if not is_name(ref.segment.handle):
            raise BadKvRef(ref.encode(), "no pool has this handle")
        fd = _open_file(shm_dir / ref.segment.handle, may_write)
        try:
            _check_whole(os.fstat(fd), parts.nbytes)
            header = read_header(os.pread(fd, PAGE, 0))  # not through the mapping: a read cannot fault
            if (header.owner, header.layout) != (ref.segment.owner, ref.layout):
                raise ValueError("the file belongs to another owner or layout")
            return cls(fd, mmap.mmap(fd, parts.nbytes, mmap.MAP_SHARED, mmap.PROT_READ), header, ref, parts)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, ValueError):
                raise BadKvRef(ref.encode(), str(error)) from None
            if isinstance(error, OSError):
                raise NoAccess(f"{ref.segment.handle} cannot be mapped: {error.strerror}") from None
            raise

    def memory(self) -> mmap.mmap:
        assert self._memory is not None, "closed"
        return self._memory

    def check(self, ref: KvRef) -> None:
        """BadKvRef when `ref` does not describe this file; SegmentGone when touching it is not safe any more."""
        if (ref.segment, ref.layout) != (self._segment, self._layout):
            raise BadKvRef(ref.encode(), "it does not describe the file that it names")
        if self._memory is None or self._memory.size() < self._nbytes:  # reading past the end would be SIGBUS
            raise SegmentGone(f"{self._segment.handle} was cut short or unmapped")

    def generations(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        """The generations of `blocks` now, read after everything that this thread has read before."""
        _read_fence()
        return tuple(int(value) for value in self._table[list(blocks)])

    def is_orphaned(self) -> bool:
        """Whether the owner is dead or has given the file up: its lock is free."""
        if self._fd is None:
            return True
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return True

    def hold(self) -> None:
        """Tell the owner that its blocks are mapped here, so that it does not free them. SegmentGone when it may have.

        The owner removes the file first and looks for holders then, so a file that is still there is in time.
        """
        assert self._fd is not None, "closed"
        try:
            hold(self._fd)
        except OSError as error:
            raise NoAccess(f"{self._segment.handle} cannot be locked: {error.strerror}") from None
        self._held = True
        if not os.fstat(self._fd).st_nlink:
            raise SegmentGone(f"{self._segment.handle} was given up by its owner")
        if _owner_is_dead(self._fd):
            raise SegmentGone(f"{self._segment.handle} has no owner any more")

    def close(self) -> None:
        """Drop the views; the memory goes with the last of them, so what someone kept stays readable."""
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        self._memory = None
        self._table = np.empty(0, dtype=np.uint64)
        if self._held:
            let_go(fd)  # a view that was kept has a duplicate of the descriptor, and so its locks
        os.close(fd)


def _open_file(path: Path, may_write: bool) -> int:
    try:
        if may_write:
            with suppress(PermissionError):
                return _open(path, os.O_RDWR)
        return _open(path, os.O_RDONLY)
    except OSError as error:
        kind = SegmentGone if error.errno == errno.ENOENT else NoAccess
        raise kind(f"{path.name} cannot be opened: {error.strerror}") from None


def _open(path: Path, how: int) -> int:
    # O_NONBLOCK: a pipe of that name must not hold the caller up
    return os.open(path, how | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _owner_is_dead(fd: int) -> bool:
    try:  # shared: beside a sweep it takes nothing away for longer than this look
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True


def _check_whole(found: os.stat_result, nbytes: int) -> None:
    """ValueError unless the file is a plain one of exactly `nbytes` with no holes.

    Touching memory past its end, or a hole of a full tmpfs, would kill this process with SIGBUS.
    """
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it names no plain file")
    if found.st_size != nbytes:
        raise ValueError(f"the file has {found.st_size} bytes, not {nbytes}")
    if found.st_blocks * 512 < nbytes:
        raise ValueError("the file has holes")


_FENCE = (threading.Lock(), threading.Lock())


def _read_fence() -> None:
    """Keep later reads of this thread behind its earlier ones.

    On x86 loads stay in order anyway. Elsewhere: what was read before stays before the first lock's release, what
    is read next stays behind the second's acquire, and a release is not passed by a later acquire.
    """
    for lock in _FENCE:
        with lock:
            pass
