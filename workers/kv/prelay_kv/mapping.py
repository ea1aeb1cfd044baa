"""A peer's segment as this process sees it."""

from __future__ import annotations

import mmap
import os
import stat
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .errors import BadKvRef, SegmentGone
from .layout import KvLayout
from .ref import KvRef
from .segment import Segment
from .shmfile import PAGE, Parts, is_name, read_header


class PeerMapping(ABC):
    """An open segment. A transport is one subclass and the function that opens it from a reference.

    The importer opens one per (owner, handle), shares it between copy threads, and calls `close` once, when no
    copy runs any more.
    """

    @abstractmethod
    def pool(self, ref: KvRef) -> torch.Tensor:
        """All blocks, `[block, layer, 2, kv_head, slot, head_dim]`, read-only: writing to it is undefined.

        BadKvRef when `ref` does not describe this memory; SegmentGone when touching it is not safe any more.
        """

    @abstractmethod
    def generations(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        """The generations of `blocks` now, read after everything that this thread has read of the pool before.

        The table lies in host memory whatever the device of the blocks.
        """

    @abstractmethod
    def close(self) -> None:
        """Unmap. What was taken from `pool` must not be touched afterwards."""


class ShmMapping(PeerMapping):
    """A file of `ShmPool`, mapped read-only. It stays readable when the owner dies and its file is removed."""

    def __init__(self, memory: mmap.mmap, segment: Segment, layout: KvLayout) -> None:
        parts = Parts.of(layout)
        self._memory: mmap.mmap | None = memory
        self._segment = segment
        self._layout = layout
        self._nbytes = parts.nbytes
        blocks = torch.from_numpy(np.asarray(_Span(memory, parts.blocks, layout.nbytes)))
        self._pool = blocks.view(getattr(torch, layout.dtype)).view(layout.shape)
        self._table = np.frombuffer(memory, dtype=np.uint64, count=layout.num_blocks, offset=parts.generations)

    @classmethod
    def open(cls, ref: KvRef, shm_dir: Path) -> ShmMapping:
        """Map the file that `ref` names in `shm_dir`.

        SegmentGone when it cannot be opened; BadKvRef when its name, size or header is not what `ref` says.
        """
        segment, parts = ref.segment, Parts.of(ref.layout)
        if not is_name(segment.handle) or (segment.device, segment.offset) != ("cpu", parts.blocks):
            raise BadKvRef(ref.encode(), "no pool of shared memory has this handle, device and offset")
        fd = _open_file(shm_dir / segment.handle)
        try:
            _check_whole(os.fstat(fd), parts.nbytes)
            header = read_header(os.pread(fd, PAGE, 0))  # not through the mapping: a read cannot fault
            if header != (segment.owner, ref.layout):
                raise ValueError("the file belongs to another owner or layout")
            return cls(mmap.mmap(fd, parts.nbytes, mmap.MAP_SHARED, mmap.PROT_READ), segment, ref.layout)
        except ValueError as error:
            raise BadKvRef(ref.encode(), str(error)) from None
        except OSError as error:
            raise SegmentGone(f"{segment.handle} cannot be mapped: {error.strerror}") from None
        finally:
            os.close(fd)

    def pool(self, ref: KvRef) -> torch.Tensor:
        if (ref.segment, ref.layout) != (self._segment, self._layout):
            raise BadKvRef(ref.encode(), "it does not describe the file that it names")
        if self._memory is None or self._memory.size() < self._nbytes:  # reading past the end would be SIGBUS
            raise SegmentGone(f"{self._segment.handle} was cut short or unmapped")
        return self._pool

    def generations(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        _read_fence()
        return tuple(int(value) for value in self._table[list(blocks)])

    def close(self) -> None:
        """Drop the views; the memory goes with the last of them, so a tensor that someone kept stays readable."""
        self._memory = None
        self._pool = torch.empty(0)
        self._table = np.empty(0, dtype=np.uint64)


class _Span:
    """A range of a read-only mapping for numpy, called writable.

    torch has no read-only tensors and warns when it wraps read-only memory. The mapping itself is what protects
    the owner: a write through the tensor faults in this process and changes nothing.
    """

    def __init__(self, memory: mmap.mmap, offset: int, nbytes: int) -> None:
        self._bytes = np.frombuffer(memory, dtype=np.uint8, count=nbytes, offset=offset)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "|u1", "shape": self._bytes.shape, "data": (self._bytes.ctypes.data, False)}


def _open_file(path: Path) -> int:
    try:  # O_NONBLOCK: a pipe of that name must not hold the caller up
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise SegmentGone(f"{path.name} cannot be opened: {error.strerror}") from None


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
