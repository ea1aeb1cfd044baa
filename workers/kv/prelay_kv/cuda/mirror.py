"""Blocks on a GPU for peers that cannot map its memory: copied to host memory, which they map instead."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from ..mapping import PeerMapping, ShmMapping
from ..ref import KvRef
from ..segment import SHM_DIR
from ..shm import ShmPool
from .copies import Copier
from .pin import Pin
from .runtime import Cudart


class Mirror:
    """A copy in host memory of the finished blocks of a pool on a GPU. Safe to use from several threads.

    Block i of the host pool mirrors block i of the device's, so the host pool's references and generation table serve
    both: raise a generation there before the device's block is written for another use.
    """

    def __init__(self, tensor: torch.Tensor, host: ShmPool, runtime: Cudart, device: int) -> None:
        """Pin the host pool, if that is allowed. `device`, where `tensor` lies, becomes this thread's current one.

        `tensor` is `[block, layer, 2, kv_head, slot, head_dim]`, contiguous, and like the host pool's (ValueError).
        CudaError when the device cannot be used. Close it before the host pool.
        """
        if (tensor.shape, tensor.dtype) != (host.tensor.shape, host.tensor.dtype) or not tensor.is_contiguous():
            raise ValueError(f"a tensor of {tuple(tensor.shape)} {tensor.dtype} is not what {host} can mirror")
        self._lock = threading.Lock()
        self._device_pool: torch.Tensor | None = tensor
        self._host_pool: torch.Tensor | None = host.tensor
        self._block_nbytes = host.layout.block_nbytes
        #: The generation at which a block was copied that was full, and so is not written any more.
        self._mirrored: dict[int, int] = {}
        with ExitStack() as undo:
            self._copier = Copier(runtime, device)
            undo.callback(self._copier.close)
            self._pin = Pin(host.tensor, runtime, device)
            undo.pop_all()

    def __repr__(self) -> str:
        state = "closed" if self._device_pool is None else "pinned" if self.pinned else "not pinned"
        return f"Mirror({len(self._mirrored)} full blocks copied, {state})"

    @property
    def pinned(self) -> bool:
        """Whether the host pool is pinned. If not, copies are slower and otherwise the same."""
        return self._pin.refused is None

    def copy(self, blocks: Sequence[int], generations: Sequence[int]) -> None:
        """Copy those of a sequence's `blocks` that are not mirrored at their generation; they are when this returns.

        1. `blocks` are in the order of their positions, so all but the last are full. A full block is copied once, as
           its bytes stay until its generation is raised. The last one is copied again each time: it may hold more than
           before. Peers that read it meanwhile see the same bytes in the positions that they were promised.
        2. Nothing runs any more when this returns or raises.
        3. After an error nothing of it counts as mirrored, and the reference must not leave this process.

        What writes the device's blocks must have been synchronised before.
        """
        wanted = dict(zip(blocks, generations, strict=True))
        with self._lock:
            if self._device_pool is None or self._host_pool is None:
                raise ValueError("the mirror is closed")
            missing = sorted(block for block, now in wanted.items() if self._mirrored.get(block) != now)  # 1
            for block in missing:
                self._mirrored.pop(block, None)
            source, target = self._device_pool.data_ptr(), self._host_pool.data_ptr()
            self._copier.copy(source, missing, target, missing, self._block_nbytes)  # 2
            self._mirrored.update((block, wanted[block]) for block in blocks[:-1])  # 3

    def close(self) -> None:
        """Wait for a copy that runs, then unpin; a second call does nothing. CudaError when the device is broken."""
        with self._lock, ExitStack() as last:
            self._device_pool = self._host_pool = None
            last.callback(self._pin.undo)
            last.callback(self._copier.close)  # before: unpinning memory under a copy is undefined


class PinnedMapping(PeerMapping):
    """A peer's pool in host shared memory, pinned here too as far as this device can, so that copies run at full speed.

    A `ShmMapping` otherwise.
    """

    def __init__(self, mapping: ShmMapping, pin: Pin | None) -> None:
        """Take over both. Use `open`."""
        self._mapping = mapping
        self._pin = pin

    @classmethod
    def open(cls, ref: KvRef, *, runtime: Cudart, device: int, shm_dir: Path = SHM_DIR) -> PinnedMapping:
        """Map the file that `ref` names, for copies to `device`, which becomes this thread's current one.

        SegmentGone and BadKvRef as from `ShmMapping`; CudaError when the device cannot be used. Pinning takes seconds
        where the pool has tens of gigabytes. So a dead owner's is not pinned: it is unmapped within a second, and
        mapped again for each of its jobs that comes still.
        """
        with ExitStack() as undo:
            mapping = ShmMapping.open(ref, shm_dir, may_write=True)
            undo.callback(mapping.close)
            pin = None if mapping.is_orphaned() else Pin(mapping.pool(ref), runtime, device, theirs=True)
            undo.pop_all()
            return cls(mapping, pin)

    @property
    def pinned(self) -> bool:
        """Whether the memory is pinned. If not, copies are slower and otherwise the same."""
        return self._pin is not None and self._pin.refused is None

    def pool(self, ref: KvRef) -> torch.Tensor:
        return self._mapping.pool(ref)

    def generations(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        """As they are in the owner's file. A copy must have been synchronised before, and not only enqueued."""
        return self._mapping.generations(blocks)

    def is_orphaned(self) -> bool:
        return self._mapping.is_orphaned()

    def close(self) -> None:
        """Unpin, then unmap. No copy may be running. CudaError when the device is broken."""
        with ExitStack() as last:
            last.callback(self._mapping.close)
            if self._pin is not None:
                last.callback(self._pin.undo)
