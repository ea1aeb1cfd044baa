"""Giving memory back while a model is loaded, so that its weights are never held twice."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterator
from pathlib import Path

#: Bytes of weights that may be replaced before what they took is given back.
_STEP = 64 << 20
#: Of malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_HEADER = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+ +(.*)")
#: Pages of a private mapping that were written to, and so are no longer the file's.
_WRITTEN = re.compile(r"Anonymous: +(\d+) kB")


class Thrift:
    """Is told of weights that were let go, and now and then gives their memory back to the system.

    Two things would keep it: the allocator, and the mapping of a weights file, whose pages stay with the process
    as long as any one tensor of the file lives.
    """

    def __init__(self) -> None:
        self._pending = 0

    def let_go(self, nbytes: int) -> None:
        self._pending += nbytes
        if self._pending >= _STEP:
            self.give_back()

    def give_back(self) -> None:
        self._pending = 0
        drop_file_pages()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
        if trim is not None:
            trim(0)


def keep_what_is_freed() -> None:
    """From now on the allocator keeps what is freed, up to a quarter of a gigabyte, for who asks next.

    A step's logits are megabytes: by default the system would give them anew each step, page by page, and zeroed.
    """
    options = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    if options is not None:
        options(_M_MMAP_THRESHOLD, 32 << 20)  # the most that it takes
        options(_M_TRIM_THRESHOLD, 256 << 20)


def drop_file_pages() -> None:
    """Unmap the pages of weights files from this process; who reads them again gets them from the page cache.

    Only of mappings that nobody has written to: what was written would be lost.
    """
    advise = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
    if advise is None:
        return
    for start, stop in list(_clean_mappings()):
        advise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)


def _clean_mappings() -> Iterator[tuple[int, int]]:
    """Address ranges of safetensors files in which no page is this process's own."""
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:  # no Linux, or not ours to read: then the pages stay
        return
    found: tuple[int, int] | None = None
    for line in lines:
        if header := _HEADER.match(line):
            path = header[3].removesuffix(" (deleted)")
            found = (int(header[1], 16), int(header[2], 16)) if path.endswith(".safetensors") else None
        elif found and (written := _WRITTEN.match(line)):
            if written[1] == "0":
                yield found
            found = None
