"""A KV pool in host shared memory: made and written by one process, mapped by others."""

from __future__ import annotations

from pathlib import Path

import torch

from .layout import KvLayout
from .owned import OwnedFile
from .pool import KvPool
from .segment import SHM_DIR
from .shmfile import Header, Parts
from .sweep import sweep

__all__ = ["ShmPool", "sweep"]


class ShmPool(KvPool):
    """A pool whose blocks are in its file.

    `tensor` and `generations` are views: the memory is given back when the pool is closed *and* the views are gone.
    """

    @classmethod
    def create(cls, owner: str, layout: KvLayout, shm_dir: Path = SHM_DIR) -> ShmPool:
        """Make the pool of worker incarnation `owner`, its whole memory reserved, so that no write can fail later.

        ShmTooSmall when `shm_dir` has not that much room; OSError when it cannot be written.
        """
        parts = Parts.of(layout)
        file = OwnedFile.create(owner, layout, parts, shm_dir)
        try:
            file.write_header(Header(owner, layout))
            flat = torch.frombuffer(file.memory, dtype=getattr(torch, layout.dtype), offset=parts.blocks)
            return cls(file, file.segment("shm", "cpu", parts.blocks), layout, flat.view(layout.shape))
        except BaseException:
            file.close()
            raise

    def close(self, unlink: bool = True) -> None:
        """Give the file up; a second call does nothing. With `unlink` off the next sweep removes it.

        Peers that have it mapped keep the memory, unchanged, until they forget this owner.
        """
        self._drop_views()
        self._file.close(unlink)
