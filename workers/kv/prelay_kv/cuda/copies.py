"""Copying blocks on a GPU."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from math import lcm

from .runtime import Cudart

#: About how much host memory is pinned at a time, bytes.
PIECE_NBYTES = 1 << 30


def piece(block_nbytes: int) -> int:
    """How many blocks of a pool in host memory are pinned at a time: whole pages of them.

    What is pinned apart is apart for copies, too: one that reaches from a piece into the next is refused.
    """
    least = lcm(block_nbytes, mmap.PAGESIZE) // block_nbytes
    return max(1, PIECE_NBYTES // (least * block_nbytes)) * least


def coalesced(src_blocks: Sequence[int], dst_blocks: Sequence[int], most: int) -> list[tuple[int, int, int]]:
    """The copies (source, destination, count) that move `src_blocks` to `dst_blocks`, pairwise and in order.

    Neighbours that are neighbours on both sides go in one, but none crosses a multiple of `most` in the source.
    ValueError when the two differ in length.
    """
    runs: list[tuple[int, int, int]] = []
    for src, dst in zip(src_blocks, dst_blocks, strict=True):
        if runs:
            first, first_dst, count = runs[-1]
            if (src, dst) == (first + count, first_dst + count) and src % most:
                runs[-1] = (first, first_dst, count + 1)
                continue
        runs.append((src, dst, 1))
    return runs


class Copier:
    """Copies blocks on a stream of its own. Safe to use from several threads, which take turns.

    The stream waits for no other. Nothing that was enqueued elsewhere before may still read or write the destination's
    blocks, and what wrote the source's must have been synchronised by its owner.
    """

    def __init__(self, runtime: Cudart, device: int) -> None:
        self._runtime = runtime
        self._device = device
        self._lock = threading.Lock()
        runtime.set_device(device)
        self._stream: int | None = runtime.stream_create()

    def __repr__(self) -> str:
        return f"Copier(device {self._device}, {'closed' if self._stream is None else 'open'})"

    def copy(
        self, src_ptr: int, src_blocks: Sequence[int], dst_ptr: int, dst_blocks: Sequence[int], block_nbytes: int
    ) -> None:
        """Copy block by block between two pools of blocks of `block_nbytes`, on host or device.

        Of a pool in host memory, which may be pinned in pieces, block i is the source, or the destination of block i.
        Nothing runs any more when this returns or raises: not the copies before the one that failed either. Until then
        the destination's blocks belong to the copy. After an error their bytes mean nothing.
        """
        runs = coalesced(src_blocks, dst_blocks, piece(block_nbytes))
        with self._lock:
            if self._stream is None:
                raise ValueError("the copier is closed")
            self._runtime.set_device(self._device)
            try:
                for src, dst, count in runs:
                    self._runtime.copy_async(
                        dst_ptr + dst * block_nbytes, src_ptr + src * block_nbytes, count * block_nbytes, self._stream
                    )
            finally:
                self._runtime.stream_synchronize(self._stream)

    def close(self) -> None:
        """Wait for a copy that runs, then give the stream back; a second call does nothing."""
        with self._lock:
            if self._stream is not None:
                stream, self._stream = self._stream, None
                self._runtime.set_device(self._device)
                self._runtime.stream_destroy(stream)
