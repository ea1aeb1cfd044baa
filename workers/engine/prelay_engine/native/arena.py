"""Memory for packed weights: large pages where the system has them, which are read half as fast again as small ones."""

from __future__ import annotations

import ctypes
import mmap

_CHUNK = 64 << 20
_ALIGN = 64


class Arena:
    """Gives memory and takes none back; all goes with the object."""

    def __init__(self) -> None:
        self._chunks: list[mmap.mmap] = []
        self._address = self._left = 0

    def take(self, nbytes: int) -> int:
        """The address of `nbytes` zeros, aligned to a line of the cache. Raise OSError."""
        size = -(-nbytes // _ALIGN) * _ALIGN
        if size > self._left:
            self._open(max(_CHUNK, size))
        address = self._address
        self._address += size
        self._left -= size
        return address

    def _open(self, size: int) -> None:
        chunk = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            chunk.madvise(mmap.MADV_HUGEPAGE)
        self._chunks.append(chunk)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(chunk))
        self._left = size
