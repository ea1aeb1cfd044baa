"""Blocks on a GPU for peers that cannot map its memory: copied to host memory, which they map instead."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from ..errors import CudaError
from ..mapping import PeerMapping, ShmMapping
from ..ref import KvRef
from ..segment import SHM_DIR
from ..shm import ShmPool
from .copies import Copier
from .runtime import Cudart

log = logging.getLogger("prelay.kv")

#: Of Linux 5.14: map all pages of a range now. And how many bytes at a time: who needs memory mapped waits meanwhile.
_MADV_POPULATE_READ = 22
_PIECE_NBYTES = 256 << 20

#: Pinned memory that the driver would not give back. It stays mapped while this process lives: the driver would take
#: other memory at the same addresses for it, and copy what is not there any more.
_STUCK: list[torch.Tensor] = []


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
            self._pin = _Pin(host.tensor, runtime, device, read_only=(False,))
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

    def __init__(self, mapping: ShmMapping, pin: _Pin) -> None:
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
            mapping = ShmMapping.open(ref, shm_dir)
            undo.callback(mapping.close)
            # The mapping is read-only. Without the flag, only a system that ignores this for the device will pin it.
            ways = () if mapping.is_orphaned() else (True, False)
            pin = _Pin(mapping.pool(ref), runtime, device, read_only=ways)
            undo.pop_all()
            return cls(mapping, pin)

    @property
    def pinned(self) -> bool:
        """Whether the memory is pinned. If not, copies are slower and otherwise the same."""
        return self._pin.refused is None

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
            last.callback(self._pin.undo)


class _Pin:
    """Blocks in host memory, registered with the runtime if it allows. Keeps them mapped until `undo`."""

    def __init__(self, blocks: torch.Tensor, runtime: Cudart, device: int, read_only: tuple[bool, ...]) -> None:
        """Try the ways in `read_only`, in their order; without any it is not pinned.

        CudaError when the device cannot be used any more.
        """
        self._blocks: torch.Tensor | None = blocks
        self._runtime = runtime
        self._device = device
        runtime.set_device(device)
        #: Why the memory is not pinned, by the last of the ways; None when it is.
        self.refused = self._register(blocks, read_only)
        if self.refused is not None:
            log.warning(
                "%.1f GiB of host memory for KV cannot be pinned, so that copies are slow: %s",
                blocks.nbytes / (1 << 30),
                self.refused,
            )

    def _register(self, blocks: torch.Tensor, ways: tuple[bool, ...]) -> str | None:
        refused = "its owner has ended"
        if ways:
            _touch(blocks)
        for read_only in ways:
            try:
                self._runtime.host_register(blocks.data_ptr(), blocks.nbytes, read_only)
            except CudaError as error:
                if error.fatal:
                    raise
                refused = str(error)  # the error itself holds on to the blocks, by its traceback
            else:
                return None
        return refused

    def undo(self) -> None:
        """Unregister; a second call does nothing. On an error the memory stays mapped, see _STUCK."""
        blocks, self._blocks = self._blocks, None
        if blocks is None or self.refused is not None:
            return
        try:
            self._runtime.set_device(self._device)
            self._runtime.host_unregister(blocks.data_ptr())
        except BaseException:
            _STUCK.append(blocks)
            raise


def _touch(blocks: torch.Tensor) -> None:
    """Map all pages, which may fail. The driver would do it while it pins, page by page under its lock, for which the
    kernels that other threads launch wait."""
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is None:
        return
    start = blocks.data_ptr()
    for first in range(start, start + blocks.nbytes, _PIECE_NBYTES):
        nbytes = min(_PIECE_NBYTES, start + blocks.nbytes - first)
        if advise(ctypes.c_void_p(first), ctypes.c_size_t(nbytes), _MADV_POPULATE_READ):
            return  # an older Linux
