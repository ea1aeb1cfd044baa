"""A peer's segment as this process sees it."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .errors import BadKvRef
from .layout import KvLayout
from .peerfile import PeerFile
from .ref import KvRef
from .shmfile import Parts


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
    def is_orphaned(self) -> bool:
        """Whether the owner is dead, or has given its pool up. Quick; from any thread until `close`."""

    @abstractmethod
    def close(self) -> None:
        """Unmap. What was taken from `pool` must not be touched afterwards."""


class FileMapping(PeerMapping):
    """What an owner's file tells of its pool, wherever the blocks are."""

    def __init__(self, file: PeerFile, pool: torch.Tensor) -> None:
        """Take over an open file and the blocks that it speaks of."""
        self._file = file
        self._pool = pool

    def pool(self, ref: KvRef) -> torch.Tensor:
        self._file.check(ref)
        return self._pool

    def generations(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        """As they are in the owner's file. A copy must have been synchronised before, and not only enqueued."""
        return self._file.generations(blocks)

    def is_orphaned(self) -> bool:
        return self._file.is_orphaned()


class ShmMapping(FileMapping):
    """A file of `ShmPool`, mapped read-only. It stays readable when the owner dies and its file is removed."""

    def __init__(self, file: PeerFile, layout: KvLayout) -> None:
        blocks = torch.from_numpy(np.asarray(_Span(file.memory(), Parts.of(layout).blocks, layout.nbytes)))
        super().__init__(file, blocks.view(getattr(torch, layout.dtype)).view(layout.shape))

    @classmethod
    def open(cls, ref: KvRef, shm_dir: Path, may_write: bool = False) -> ShmMapping:
        """Map the file that `ref` names in `shm_dir`; `may_write` as for `PeerFile.open`.

        SegmentGone when it cannot be opened; BadKvRef when its name, size or header is not what `ref` says.
        """
        parts = Parts.of(ref.layout)
        if (ref.segment.device, ref.segment.offset) != ("cpu", parts.blocks):
            raise BadKvRef(ref.encode(), "no pool of shared memory has this device and offset")
        return cls(PeerFile.open(ref, parts, shm_dir, may_write), ref.layout)

    def close(self) -> None:
        """Drop the views; the memory goes with the last of them, so a tensor that someone kept stays readable."""
        self._pool = torch.empty(0)
        self._file.close()


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
