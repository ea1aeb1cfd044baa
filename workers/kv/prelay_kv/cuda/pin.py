"""Host memory that is pinned, so that a device copies from it and to it at full speed."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import CudaError
from .copies import piece
from .runtime import Cudart

log = logging.getLogger("prelay.kv")

#: Of Linux 5.14: map all pages of a range now, to be read or to be written. And how many bytes at a time: who needs
#: memory mapped meanwhile waits.
_POPULATE_READ, _POPULATE_WRITE = 22, 23
_POPULATED_NBYTES = 256 << 20

#: Pinned memory that the driver would not give back. It stays mapped while this process lives: the driver would take
#: other memory at the same addresses for it, and copy what is not there any more.
STUCK: list[torch.Tensor] = []

_libc = ctypes.CDLL(None, use_errno=True)


class Pin:
    """Blocks in host memory, registered with the runtime if it allows. Keeps them mapped until `undo`.

    They are registered piece by piece, all or none: the driver's lock, for which all processes of the machine wait, is
    held for a tenth of a second a GiB, and drivers and kernels have limits for one call (2 GiB, 512 GiB). No copy may
    reach from one piece to the next; see `copies.piece`.
    """

    def __init__(self, blocks: torch.Tensor, runtime: Cudart, device: int, *, theirs: bool = False) -> None:
        """Pin all of `blocks` [block, …]. CudaError when the device cannot be used any more.

        `theirs`: it is a peer's memory, mapped read-only. Few devices pin such; then it is made writable while it is
        pinned, if its file was opened so. It is not written to.
        """
        self._blocks: torch.Tensor | None = blocks
        self._runtime = runtime
        self._device = device
        self._registered: list[int] = []
        runtime.set_device(device)
        #: Why the memory is not pinned; None when it is.
        self.refused = self._register_theirs(blocks) if theirs else self._register(blocks)
        if self.refused is not None:
            log.warning(
                "%.1f GiB of host memory for KV cannot be pinned, so that copies are slow: %s",
                blocks.nbytes / (1 << 30),
                self.refused,
            )

    def _register_theirs(self, blocks: torch.Tensor) -> str | None:
        refused = self._register(blocks, read_only=True)
        if refused is None:
            return None
        try:
            with _writable(blocks):
                return self._register(blocks)
        except OSError as error:
            return f"{refused}, and it cannot be made writable: {error.strerror}"

    def _register(self, blocks: torch.Tensor, read_only: bool = False) -> str | None:
        """Why it was refused."""
        for pointer, nbytes in _pieces(blocks):
            _populate(pointer, nbytes, _POPULATE_READ if read_only else _POPULATE_WRITE)
            try:
                self._runtime.host_register(pointer, nbytes, read_only)
            except CudaError as error:
                self._unregister(blocks)
                if error.fatal:
                    raise
                return str(error)  # the error itself holds on to the blocks, by its traceback
            self._registered.append(pointer)
        return None

    def undo(self) -> None:
        """Unregister; a second call does nothing. On an error the memory stays mapped, see STUCK."""
        blocks, self._blocks = self._blocks, None
        if blocks is not None and self._registered:
            self._unregister(blocks)

    def _unregister(self, blocks: torch.Tensor) -> None:
        try:
            self._runtime.set_device(self._device)
            while self._registered:
                self._runtime.host_unregister(self._registered[-1])
                self._registered.pop()
        except BaseException:
            STUCK.append(blocks)
            raise


def _pieces(blocks: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Address and bytes of each piece, which have no page in common."""
    start, stop = blocks.data_ptr(), blocks.data_ptr() + blocks.nbytes
    step = piece(blocks[0].nbytes) * blocks[0].nbytes
    if start % mmap.PAGESIZE:  # of a machine whose pages are larger than a file's parts are aligned to
        step = blocks.nbytes
    for first in range(start, stop, step):
        yield first, min(step, stop - first)


def _populate(pointer: int, nbytes: int, how: int) -> None:
    """Map the pages; an older Linux will not, and nothing depends on it.

    Otherwise the driver would, page by page under its lock.
    """
    stop, pointer = pointer + nbytes, pointer - pointer % mmap.PAGESIZE
    for first in range(pointer, stop, _POPULATED_NBYTES):
        size = min(_POPULATED_NBYTES, stop - first)
        if _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), how):
            return


@contextmanager
def _writable(blocks: torch.Tensor) -> Iterator[None]:
    """Inside, this process's mapping of `blocks` can be written to; what is pinned there stays so. OSError."""
    pointer = blocks.data_ptr() - blocks.data_ptr() % mmap.PAGESIZE
    nbytes = blocks.data_ptr() + blocks.nbytes - pointer
    _protect(pointer, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
    try:
        yield
    finally:
        _protect(pointer, nbytes, mmap.PROT_READ)


def _protect(pointer: int, nbytes: int, how: int) -> None:
    if _libc.mprotect(ctypes.c_void_p(pointer), ctypes.c_size_t(nbytes), how):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
