"""Copies of blocks: which runs they make, and that nothing runs any more when they are over."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prelay_kv.cuda.copies import Copier, coalesced, piece
from prelay_kv.cuda.runtime import Cudart
from prelay_kv.errors import CudaError
from tests.bed.cudart import FakeGpus, library

BLOCK = 4096
BLOCKS = 16


@pytest.mark.parametrize(
    ("src", "dst", "runs"),
    [
        ([], [], []),
        ([3], [9], [(3, 9, 1)]),
        ([3, 4, 5], [7, 8, 9], [(3, 7, 3)]),
        ([3, 4, 5], [7, 9, 10], [(3, 7, 1), (4, 9, 2)]),
        ([3, 5, 6], [7, 8, 9], [(3, 7, 1), (5, 8, 2)]),
        ([5, 4, 3], [2, 1, 0], [(5, 2, 1), (4, 1, 1), (3, 0, 1)]),
        ([1, 1], [2, 3], [(1, 2, 1), (1, 3, 1)]),
    ],
)
def test_blocks_that_are_neighbours_on_both_sides_are_one_copy(
    src: list[int], dst: list[int], runs: list[tuple[int, int, int]]
) -> None:
    assert coalesced(src, dst, 100) == runs


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))), st.integers(1, 10))
def test_the_runs_are_the_pairs_and_no_two_of_them_could_be_one(pairs: list[tuple[int, int]], most: int) -> None:
    runs = coalesced([src for src, _ in pairs], [dst for _, dst in pairs], most)
    assert [(src + i, dst + i) for src, dst, count in runs for i in range(count)] == pairs
    for (src, dst, count), after in pairwise(runs):
        assert (src + count, dst + count) != after[:2] or after[0] % most == 0
    assert all(src // most == (src + count - 1) // most for src, _, count in runs)


def test_two_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        coalesced([1, 2], [1], 100)


@pytest.mark.parametrize(
    ("block_nbytes", "blocks"),
    [(2 << 20, 512), (4096, 1 << 18), (3 * 4096, (1 << 30) // (3 * 4096)), (2 << 30, 1), (4098, 127 * 2048)],
)
def test_a_piece_is_a_gibibyte_of_whole_pages_or_a_little_less(block_nbytes: int, blocks: int) -> None:
    assert piece(block_nbytes) == blocks
    assert piece(block_nbytes) * block_nbytes % 4096 == 0


class Counted(Cudart):
    """Counts copies and synchronisations, and can refuse the nth copy."""

    def __init__(self) -> None:
        super().__init__(library())
        self.copies = self.synchronised = 0
        self.refused: int | None = None

    def copy_async(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self.copies += 1
        if self.copies == self.refused:
            raise CudaError("cudaMemcpyAsync", 1, "refused")
        super().copy_async(dst, src, nbytes, stream)

    def stream_synchronize(self, stream: int) -> None:
        self.synchronised += 1
        super().stream_synchronize(stream)


@pytest.fixture
def counted(gpus: FakeGpus) -> Counted:
    return Counted()


@pytest.fixture
def pools(counted: Counted) -> Iterator[tuple[int, int]]:
    """Two pools of BLOCKS blocks; each byte of the first is the number of its block, the second is 0xff."""
    pools = counted.malloc(BLOCK * BLOCKS), counted.malloc(BLOCK * BLOCKS)
    for block in range(BLOCKS):
        ctypes.memset(pools[0] + block * BLOCK, block, BLOCK)
    ctypes.memset(pools[1], 0xFF, BLOCK * BLOCKS)
    yield pools
    for pointer in pools:
        counted.free(pointer)


def numbers(pointer: int) -> list[int]:
    """What each block holds everywhere."""
    found = [set(ctypes.string_at(pointer + block * BLOCK, BLOCK)) for block in range(BLOCKS)]
    assert all(len(values) == 1 for values in found)
    return [values.pop() for values in found]


def test_each_block_goes_where_its_partner_is(counted: Counted, pools: tuple[int, int]) -> None:
    copier = Copier(counted, 0)
    copier.copy(pools[0], [6, 7, 8, 2, 15], pools[1], [0, 1, 2, 15, 8], BLOCK)
    assert numbers(pools[1]) == [6, 7, 8, *[255] * 5, 15, *[255] * 6, 2]
    assert (counted.copies, counted.synchronised) == (3, 1)
    copier.close()


def test_a_copy_that_fails_leaves_none_running(counted: Counted, pools: tuple[int, int]) -> None:
    copier = Copier(counted, 0)
    counted.refused = 3
    with pytest.raises(CudaError, match="refused"):
        copier.copy(pools[0], [1, 3, 5, 7], pools[1], [0, 2, 4, 6], BLOCK)
    # Then the two before it have ended
    assert counted.synchronised == 1
    assert numbers(pools[1])[:8] == [1, 255, 3, 255, 255, 255, 255, 255]
    # And the stream is as good as new
    copier.copy(pools[0], [9], pools[1], [9], BLOCK)
    assert numbers(pools[1])[9] == 9
    copier.close()


def test_a_copy_whose_source_was_unmapped_is_an_error_of_its_synchronisation(gpus: FakeGpus, counted: Counted) -> None:
    pointer, target = counted.malloc(BLOCK), counted.malloc(BLOCK)
    with gpus.elsewhere():
        mapped = counted.ipc_open(counted.ipc_handle(pointer))

    class Unmaps(Counted):
        def stream_synchronize(self, stream: int) -> None:
            counted.ipc_close(mapped)
            super().stream_synchronize(stream)

    copier = Copier(Unmaps(), 0)
    with pytest.raises(CudaError, match="cudaStreamSynchronize") as caught:
        copier.copy(mapped, [0], target, [0], BLOCK)
    assert caught.value.fatal
    gpus.reset()


def test_lists_that_do_not_fit_enqueue_nothing(counted: Counted, pools: tuple[int, int]) -> None:
    copier = Copier(counted, 0)
    with pytest.raises(ValueError, match="zip"):
        copier.copy(pools[0], [1, 2], pools[1], [1], BLOCK)
    assert (counted.copies, counted.synchronised) == (0, 0)
    copier.close()


def test_a_copier_works_on_its_device_from_any_thread(gpus: FakeGpus, counted: Counted) -> None:
    gpus.set(devices=2)
    counted.set_device(1)
    pools = counted.malloc(BLOCK * BLOCKS), counted.malloc(BLOCK * BLOCKS)
    ctypes.memset(pools[0], 5, BLOCK)
    copier = Copier(counted, 1)
    devices: list[int] = []

    def copy() -> None:
        copier.copy(pools[0], [0], pools[1], [0], BLOCK)
        devices.append(counted.memory()[0])  # of the device that is this thread's now

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()
    assert ctypes.string_at(pools[1], BLOCK) == bytes([5]) * BLOCK
    assert devices == [counted.memory()[0]]
    counted.set_device(0)
    assert devices != [counted.memory()[0]]
    copier.close()
    for pointer in pools:
        counted.free(pointer)


def test_threads_take_turns(counted: Counted, pools: tuple[int, int]) -> None:
    copier = Copier(counted, 0)
    with ThreadPoolExecutor(4) as threads:
        jobs = [
            threads.submit(copier.copy, pools[0], [block], pools[1], [BLOCKS - 1 - block], BLOCK)
            for block in range(BLOCKS)
        ]
        for job in jobs:
            job.result()
    assert numbers(pools[1]) == list(reversed(range(BLOCKS)))
    copier.close()


def test_a_closed_copier_takes_nothing_more(counted: Counted, pools: tuple[int, int]) -> None:
    copier = Copier(counted, 0)
    assert "open" in repr(copier)
    copier.close()
    copier.close()
    assert "closed" in repr(copier)
    with pytest.raises(ValueError, match="closed"):
        copier.copy(pools[0], [1], pools[1], [1], BLOCK)
    assert counted.copies == 0


def test_a_copier_is_not_closed_under_a_copy(counted: Counted, pools: tuple[int, int]) -> None:
    destroyed = threading.Event()

    class Closing(Counted):
        def stream_synchronize(self, stream: int) -> None:
            closer.start()
            assert not destroyed.wait(0.05)
            super().stream_synchronize(stream)

        def stream_destroy(self, stream: int) -> None:
            destroyed.set()
            super().stream_destroy(stream)

    copier = Copier(Closing(), 0)
    closer = threading.Thread(target=copier.close)
    copier.copy(pools[0], [3], pools[1], [0], BLOCK)
    closer.join()
    assert destroyed.is_set()
    assert numbers(pools[1])[0] == 3
