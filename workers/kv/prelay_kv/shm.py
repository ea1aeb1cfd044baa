"""A KV pool in host shared memory: made and written by one process, mapped by others."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from .checks import need_text
from .errors import ShmTooSmall
from .layout import KvLayout
from .ref import KvRef
from .segment import SHM_DIR, Segment, domain
from .shmfile import Parts, create_locked, pack_header
from .sweep import sweep

__all__ = ["ShmPool", "sweep"]


class ShmPool:
    """The blocks of one worker and their generation table. Only this process writes either.

    Raise a block's generation before its memory is written for another use; whoever copied the block compares
    afterwards. `tensor` and `generations` are views: the memory is given back when the pool is closed *and* the
    views are gone.
    """

    def __init__(self, fd: int, path: Path, segment: Segment, layout: KvLayout) -> None:
        """Take over the locked file `fd`, already at its full size. Use `create`."""
        parts = Parts.of(layout)
        memory = mmap.mmap(fd, parts.nbytes)
        header = pack_header(segment.owner, layout)
        memory[: len(header)] = header
        flat = torch.frombuffer(memory, dtype=getattr(torch, layout.dtype), offset=parts.blocks)
        self._fd: int | None = fd
        self.path = path
        self.segment = segment
        self.layout = layout
        #: `[block, layer, 2, kv_head, slot, head_dim]`, zero at first.
        self.tensor: torch.Tensor = flat.view(layout.shape)
        #: Generation of each block, 0 at first: an incarnation has its own file, so no count is carried over.
        self.generations: npt.NDArray[np.uint64] = np.frombuffer(
            memory, dtype=np.uint64, count=layout.num_blocks, offset=parts.generations
        )

    @classmethod
    def create(cls, owner: str, layout: KvLayout, shm_dir: Path = SHM_DIR) -> ShmPool:
        """Make the pool of worker incarnation `owner`, its whole memory reserved, so that no write can fail later.

        ShmTooSmall when `shm_dir` has not that much room; OSError when it cannot be written.
        """
        need_text("owner", owner)
        parts = Parts.of(layout)
        _refuse_if_short(shm_dir, parts.nbytes)
        fd, path = create_locked(shm_dir, owner)
        try:
            _reserve(fd, parts.nbytes, shm_dir)
            segment = Segment(
                node=domain(shm_dir),
                owner=owner,
                device="cpu",
                kind="shm",
                handle=path.name,
                offset=parts.blocks,
                nbytes=layout.nbytes,
                layout_hash=layout.layout_hash,
                numerics_hash=layout.numerics_hash,
            )
            return cls(fd, path, segment, layout)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise

    def __repr__(self) -> str:
        state = "closed" if self._fd is None else "open"
        return f"ShmPool({self.path.name}, {self.layout.num_blocks} blocks, {state})"

    def ref(self, blocks: Iterable[int], generations: Iterable[int], tokens: int) -> KvRef:
        """The reference to hand over for positions 0 … tokens-1 in `blocks`; ValueError when they contradict."""
        return KvRef(self.segment, tuple(map(int, blocks)), tuple(map(int, generations)), tokens, self.layout)

    def close(self, unlink: bool = True) -> None:
        """Give the file up; a second call does nothing. With `unlink` off the next sweep removes it.

        Peers that have it mapped keep the memory, unchanged, until they forget this owner.
        """
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        self.tensor = torch.empty(0)
        self.generations = np.empty(0, dtype=np.uint64)
        if unlink:  # while the lock is held: a sweep that looks now leaves the file alone
            self.path.unlink(missing_ok=True)
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
