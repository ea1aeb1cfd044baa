"""Blocks on a GPU that peers read from host memory: what is copied and when, and how both sides pin that memory."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prelay_engine.blocks import BlockPool
from prelay_kv.cuda import copies
from prelay_kv.cuda import pin as pins
from prelay_kv.cuda.copies import Copier
from prelay_kv.cuda.mirror import Mirror, PinnedMapping
from prelay_kv.cuda.runtime import Cudart
from prelay_kv.cuda.tensors import wrap
from prelay_kv.errors import BadKvRef, CudaError, SegmentGone, StaleKv
from prelay_kv.importer import Importer
from prelay_kv.layout import KvLayout
from prelay_kv.segment import domain
from prelay_kv.shm import ShmPool
from tests.bed.cudart import FakeGpus, library


class Watched(Cudart):
    """Notes copies and registrations. Refuses the nth copy, and to unregister, when told so."""

    def __init__(self) -> None:
        super().__init__(library())
        self.copied = 0  # bytes
        self.copies = 0
        self.refused_copy: int | None = None
        self.streams: set[int] = set()
        self.log: list[tuple[str, int, int, bool]] = []
        self.unregister_fails = False

    def stream_create(self) -> int:
        stream = super().stream_create()
        self.streams.add(stream)
        return stream

    def stream_destroy(self, stream: int) -> None:
        super().stream_destroy(stream)
        self.streams.remove(stream)

    def copy_async(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self.copies += 1
        if self.copies == self.refused_copy:
            raise CudaError("cudaMemcpyAsync", 1, "refused")
        self.copied += nbytes
        super().copy_async(dst, src, nbytes, stream)

    def host_register(self, pointer: int, nbytes: int, read_only: bool = False) -> None:
        super().host_register(pointer, nbytes, read_only)
        self.log.append(("register", pointer, nbytes, read_only))

    def host_unregister(self, pointer: int) -> None:
        if self.unregister_fails:
            raise CudaError("cudaHostUnregister", 700, "refused")
        super().host_unregister(pointer)
        self.log.append(("unregister", pointer, 0, is_mapped(pointer)))


def is_mapped(pointer: int) -> bool:
    spans = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(first, 16) <= pointer < int(stop, 16) for first, stop in spans)


def resident(pointer: int) -> int:
    """Bytes of the mapping that `pointer` is in whose pages this process need not ask for any more."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word = line.split()[0]
        if "-" in word:
            first, stop = (int(end, 16) for end in word.split("-"))
            inside = first <= pointer < stop
        elif inside and word == "Rss:":
            return 1024 * int(line.split()[1])
    return 0


class Pools:
    """A pool on the device, its host pool, and who hands their blocks out."""

    def __init__(self, runtime: Watched, layout: KvLayout, shm_dir: Path) -> None:
        self.runtime = runtime
        self.layout = layout
        self.pointer = runtime.malloc(layout.nbytes)
        self.tensor = wrap(self.pointer, layout.nbytes, getattr(torch, layout.dtype), layout.shape, "cpu")
        self.host = ShmPool.create("peer", layout, shm_dir)
        self.blocks = BlockPool(layout.num_blocks, self.host.generations)

    def export(self, mirror: Mirror, blocks: list[int]) -> int:
        """Copy as a worker does; how many blocks were copied."""
        before = self.runtime.copied
        mirror.copy(blocks, [int(x) for x in self.host.generations[blocks]])
        return (self.runtime.copied - before) // self.layout.block_nbytes

    def wrong(self, blocks: list[int]) -> list[int]:
        """Those whose mirrors are not what the device holds."""
        return [block for block in blocks if not torch.equal(self.host.tensor[block], self.tensor[block])]

    def close_host(self) -> None:
        self.blocks.generations = np.empty(0, dtype=np.uint64)  # a view of the memory
        self.host.close()

    def close(self) -> None:
        self.close_host()
        self.runtime.free(self.pointer)


@pytest.fixture
def watched(gpus: FakeGpus) -> Watched:
    return Watched()


@pytest.fixture
def pools(watched: Watched, layout: KvLayout, shm_dir: Path) -> Iterator[Pools]:
    """Each element of the device's pool holds 1 + the number of its block, those of the host's are zero."""
    pools = Pools(watched, layout, shm_dir)
    for block in range(layout.num_blocks):
        pools.tensor[block] = 1 + block
    with closing(pools):
        yield pools


@pytest.fixture
def mirror(pools: Pools) -> Iterator[Mirror]:
    with closing(Mirror(pools.tensor, pools.host, pools.runtime, 0)) as mirror:
        yield mirror


# What is copied


def test_exported_blocks_are_in_host_memory_when_the_copy_returns(pools: Pools, mirror: Mirror) -> None:
    blocks = pools.blocks.take("a", 3)
    assert pools.export(mirror, blocks) == 3
    assert pools.wrong(blocks) == []
    assert not pools.host.tensor[3:].any()


def test_neighbours_are_one_copy_in_whatever_order_a_sequence_has_them(pools: Pools, mirror: Mirror) -> None:
    assert pools.export(mirror, [5, 1, 0, 2, 6]) == 5
    assert pools.runtime.copies == 2
    assert pools.wrong([0, 1, 2, 5, 6]) == []


def test_a_shared_prefix_is_copied_once(pools: Pools, mirror: Mirror) -> None:
    first = pools.blocks.take("a", 3)
    pools.export(mirror, first)
    second = [*first[:2], *pools.blocks.take("b", 2)]
    assert pools.export(mirror, second) == 2
    assert pools.wrong(second) == []


def test_a_block_that_was_the_last_one_is_copied_again_as_it_may_hold_more(pools: Pools, mirror: Mirror) -> None:
    # Given a sequence whose last block was partly filled when it was exported
    blocks = pools.blocks.take("a", 2)
    pools.export(mirror, blocks)
    # When it is filled up at the same generation, and exported again with a block behind it
    pools.tensor[blocks[1], ..., 2:, :] = 77
    longer = [*blocks, *pools.blocks.take("a", 1)]
    assert pools.export(mirror, longer) == 2
    # Then the mirror holds all of it
    assert pools.wrong(longer) == []
    # And from now on, full as it is, it is copied no more, not even as the last one of another's
    assert pools.export(mirror, blocks) == 0


def test_the_last_block_of_an_export_that_is_repeated_is_copied_again(pools: Pools, mirror: Mirror) -> None:
    blocks = pools.blocks.take("a", 2)
    assert [pools.export(mirror, blocks) for _ in range(3)] == [2, 1, 1]


def test_a_block_that_was_handed_out_again_is_copied_again(pools: Pools, mirror: Mirror) -> None:
    blocks = pools.blocks.take("a", 3)
    pools.export(mirror, blocks)
    pools.blocks.give_back("a")
    again = pools.blocks.take("b", 3)
    pools.tensor[again] += 100
    assert pools.export(mirror, again) == 3
    assert pools.wrong(again) == []


def test_a_copy_that_fails_counts_for_nothing_and_has_ended(pools: Pools, mirror: Mirror) -> None:
    blocks = [0, 2, 4, 6]
    pools.runtime.refused_copy = 3
    with pytest.raises(CudaError, match="refused"):
        pools.export(mirror, blocks)
    assert pools.wrong(blocks) == [4, 6]  # the two before it are over, not waiting
    pools.runtime.refused_copy = None
    assert pools.export(mirror, blocks) == 4
    assert pools.wrong(blocks) == []


def test_a_copy_that_fails_takes_nothing_from_what_was_copied_before(pools: Pools, mirror: Mirror) -> None:
    pools.export(mirror, [0, 1, 2])
    pools.runtime.refused_copy = pools.runtime.copies + 1
    with pytest.raises(CudaError):
        pools.export(mirror, [0, 1, 4, 5])
    assert pools.export(mirror, [0, 1, 4, 5]) == 2


def test_blocks_without_their_generations_are_refused(pools: Pools, mirror: Mirror) -> None:
    with pytest.raises(ValueError, match="zip"):
        mirror.copy([1, 2], [1])
    assert pools.runtime.copies == 0


def test_two_threads_that_export_at_once_take_turns(pools: Pools, mirror: Mirror) -> None:
    together = threading.Barrier(2)

    def export(blocks: list[int]) -> None:
        together.wait(timeout=10)
        for _ in range(50):
            mirror.copy(blocks, [0] * len(blocks))

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(export, blocks) for blocks in ([0, 1, 2], [0, 1, 5])]:
            done.result()
    assert pools.wrong([0, 1, 2, 5]) == []


class Texts:
    """Sequences that share full blocks, grow in their last one, are exported at any time, and go."""

    def __init__(self, pools: Pools, mirror: Mirror) -> None:
        self.pools, self.mirror = pools, mirror
        self.size = pools.layout.block_size
        self.ids = BlockPool(pools.layout.num_blocks)
        self.tokens: dict[str, int] = {}
        self.written = 100

    def come(self, key: str, like: str) -> None:
        shared = self.ids.blocks(like)[: self.tokens[like] // self.size] if like in self.tokens else ()
        if key not in self.tokens and self.ids.available:
            self.ids.take(key, 1, shared=shared)
            self.tokens[key] = len(shared) * self.size

    def grow(self, key: str) -> None:
        index, slot = divmod(self.tokens[key], self.size)
        if index == self.ids.count(key) and self.ids.available:
            self.ids.take(key, 1)
        if index < self.ids.count(key):
            self.written += 1
            self.pools.tensor[self.ids.blocks(key)[index], ..., slot, :] = self.written
            self.tokens[key] += 1

    def export(self, key: str) -> None:
        blocks = list(self.ids.blocks(key))[: -(-self.tokens[key] // self.size)]
        self.mirror.copy(blocks, [int(x) for x in self.ids.generations[blocks]])
        assert self.pools.wrong(blocks) == []

    def go(self, key: str) -> None:
        self.ids.give_back(key)
        del self.tokens[key]


KEYS = st.sampled_from("abc")
MOVES = st.tuples(st.sampled_from(["come", "grow", "grow", "grow", "export", "export", "go"]), KEYS, KEYS)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(MOVES, max_size=40))
def test_whatever_is_exported_the_mirror_holds_what_the_device_does(
    pools: Pools, moves: list[tuple[str, str, str]]
) -> None:
    with closing(Mirror(pools.tensor, pools.host, pools.runtime, 0)) as mirror:
        texts = Texts(pools, mirror)
        for move, key, like in moves:
            if move == "come":
                texts.come(key, like)
            elif key in texts.tokens:
                getattr(texts, move)(key)


# Pinning on the owner's side


def test_the_host_pool_s_blocks_are_pinned_while_the_mirror_is_open(pools: Pools) -> None:
    start = pools.host.tensor.data_ptr()
    mirror = Mirror(pools.tensor, pools.host, pools.runtime, 0)
    assert mirror.pinned
    assert pools.runtime.log == [("register", start, pools.layout.nbytes, False)]
    mirror.close()
    mirror.close()
    assert pools.runtime.log[1:] == [("unregister", start, 0, True)]


def test_the_memory_goes_with_the_pool_and_not_with_the_mirror(pools: Pools, mapped: Callable[[], int]) -> None:
    mirror = Mirror(pools.tensor, pools.host, pools.runtime, 0)
    mirror.close()
    pools.close_host()
    assert mapped() == 0


def test_memory_that_cannot_be_pinned_works_too_and_is_warned_of(
    pools: Pools, gpus: FakeGpus, caplog: pytest.LogCaptureFixture
) -> None:
    gpus.set(fail="cudaHostRegister=801")
    with closing(Mirror(pools.tensor, pools.host, pools.runtime, 0)) as mirror:
        assert not mirror.pinned
        assert "not pinned" in repr(mirror)
        assert "cudaErrorNotSupported (801)" in caplog.text
        pools.export(mirror, [1, 2])
        assert pools.wrong([1, 2]) == []
    assert pools.runtime.log == []


def test_a_device_that_breaks_while_memory_is_pinned_leaves_nothing_open(pools: Pools, gpus: FakeGpus) -> None:
    gpus.set(fail="cudaHostRegister=700")
    with pytest.raises(CudaError, match="700"):
        Mirror(pools.tensor, pools.host, pools.runtime, 0)
    gpus.set(fail=None)
    assert pools.runtime.streams == set()


def test_memory_that_cannot_be_unpinned_stays_mapped(
    pools: Pools, mapped: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck: list[torch.Tensor] = []
    monkeypatch.setattr(pins, "STUCK", stuck)
    mirror = Mirror(pools.tensor, pools.host, pools.runtime, 0)
    pools.runtime.unregister_fails = True
    with pytest.raises(CudaError, match="cudaHostUnregister"):
        mirror.close()
    mirror.close()  # which has nothing left to do
    pools.close_host()
    assert mapped() == 1
    pools.runtime.unregister_fails = False
    pools.runtime.host_unregister(stuck.pop().data_ptr())
    assert mapped() == 0


def test_a_closed_mirror_copies_nothing(pools: Pools) -> None:
    mirror = Mirror(pools.tensor, pools.host, pools.runtime, 0)
    mirror.close()
    with pytest.raises(ValueError, match="closed"):
        pools.export(mirror, [1])


def test_pools_that_are_not_alike_are_refused(pools: Pools, layout: KvLayout, shm_dir: Path) -> None:
    with closing(ShmPool.create("other", replace(layout, num_blocks=9), shm_dir)) as other:
        for tensor in (pools.tensor, other.tensor.half(), other.tensor.transpose(1, 2)):
            with pytest.raises(ValueError, match="can mirror"):
                Mirror(tensor, other, pools.runtime, 0)
    assert pools.runtime.log == []


# The peer's side


class Importing:
    """An importer that pins, and copies into blocks of its own on the device."""

    def __init__(self, runtime: Watched, layout: KvLayout, shm_dir: Path) -> None:
        self.mappings: list[PinnedMapping] = []
        opener = partial(PinnedMapping.open, runtime=runtime, device=0, shm_dir=shm_dir)

        def open_(ref: object) -> PinnedMapping:
            self.mappings.append(opener(ref))  # type: ignore[arg-type]
            return self.mappings[-1]

        self.importer = Importer(
            layout.layout_hash, layout.numerics_hash, domain(shm_dir), shm_dir, openers={"shm": open_}
        )
        self._runtime, self._layout = runtime, layout
        self._copier = Copier(runtime, 0)
        self._pointer = runtime.malloc(layout.nbytes)
        self.after: Callable[[], object] = lambda: None

    def copy(self, pool: torch.Tensor, blocks: tuple[int, ...]) -> None:
        here = range(len(blocks))
        self._copier.copy(pool.data_ptr(), blocks, self._pointer, here, self._layout.block_nbytes)
        self.after()

    def numbers(self, count: int) -> list[float]:
        tensor = wrap(self._pointer, self._layout.nbytes, torch.float32, self._layout.shape, "cpu")[:count]
        assert all(block.eq(block.flatten()[0]).all() for block in tensor)
        return [block.flatten()[0].item() for block in tensor]

    def close(self) -> None:
        self.mappings.clear()
        self.importer.close()
        self._copier.close()
        self._runtime.free(self._pointer)


@pytest.fixture
def importing(pools: Pools, layout: KvLayout, shm_dir: Path) -> Iterator[Importing]:
    with closing(Importing(pools.runtime, layout, shm_dir)) as importing:
        yield importing


def test_blocks_go_from_one_device_to_another_through_host_memory(
    pools: Pools, mirror: Mirror, importing: Importing
) -> None:
    pools.export(mirror, [6, 0, 3])
    ref = pools.host.ref([6, 0, 3], [0, 0, 0], tokens=9)
    importing.importer.fetch(ref, importing.copy)
    assert importing.numbers(3) == [7, 1, 4]
    assert [mapping.pinned for mapping in importing.mappings] == [True]


def test_a_block_handed_out_again_while_it_is_copied_is_stale(
    pools: Pools, mirror: Mirror, importing: Importing
) -> None:
    blocks = pools.blocks.take("a", 2)
    pools.export(mirror, blocks)
    ref = pools.host.ref(blocks, pools.host.generations[blocks], tokens=5)

    def reuse() -> None:
        pools.blocks.give_back("a")
        pools.blocks.take("b", 2)

    importing.after = reuse
    with pytest.raises(StaleKv):
        importing.importer.fetch(ref, importing.copy)


def test_a_peer_s_memory_is_pinned_read_only_and_unpinned_before_it_is_unmapped(
    pools: Pools, importing: Importing, mapped: Callable[[], int]
) -> None:
    importing.importer.fetch(pools.host.ref([1], [0], tokens=1), importing.copy)
    (start,) = {entry[1] for entry in pools.runtime.log}
    assert pools.runtime.log == [("register", start, pools.layout.nbytes, True)]
    importing.mappings.clear()
    importing.importer.forget("peer")
    assert pools.runtime.log[1:] == [("unregister", start, 0, True)]
    assert mapped() == 1  # the owner's
    assert not is_mapped(start)


def test_all_pages_are_mapped_before_the_driver_pins_them_under_its_lock(
    layout: KvLayout, gpus: FakeGpus, shm_dir: Path
) -> None:
    found: list[int] = []

    class Looks(Cudart):
        def host_register(self, pointer: int, nbytes: int, read_only: bool = False) -> None:
            found.append(resident(pointer))
            super().host_register(pointer, nbytes, read_only)

    large = replace(layout, num_blocks=4096)
    with closing(ShmPool.create("peer", large, shm_dir)) as host:
        PinnedMapping.open(host.ref([1], [0], tokens=1), runtime=Looks(library()), device=0, shm_dir=shm_dir).close()
    assert found
    assert min(found) >= large.nbytes


def test_a_dead_owner_s_memory_is_read_without_being_pinned(pools: Pools, mirror: Mirror, importing: Importing) -> None:
    pools.export(mirror, [2])
    ref = pools.host.ref([2], [0], tokens=1)
    mirror.close()
    # Given an owner that is dead, and its file not swept yet
    pools.host.close(unlink=False)
    try:
        importing.importer.fetch(ref, importing.copy)
    finally:
        pools.host.path.unlink()
    assert importing.numbers(1) == [3]
    assert [mapping.pinned for mapping in importing.mappings] == [False]
    assert importing.importer.orphans() == {"peer"}


def test_a_tensor_that_is_kept_stays_readable_and_is_not_pinned_any_more(
    pools: Pools, watched: Watched, shm_dir: Path
) -> None:
    pools.host.tensor[1] = 5
    ref = pools.host.ref([1], [0], tokens=1)
    mapping = PinnedMapping.open(ref, runtime=watched, device=0, shm_dir=shm_dir)
    kept = mapping.pool(ref)
    mapping.close()
    mapping.close()
    assert [entry[0] for entry in watched.log] == ["register", "unregister"]
    assert kept[1].eq(5).all()
    with pytest.raises(SegmentGone):
        mapping.pool(ref)


def permissions(pointer: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, stop = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= pointer < stop:
            return line.split()[1]
    return ""


def test_where_nothing_read_only_is_pinned_it_is_writable_only_while_that_is_done(
    pools: Pools, mirror: Mirror, importing: Importing, gpus: FakeGpus, mapped: Callable[[], int]
) -> None:
    # Given a device that pins memory only to write to it, as most do
    gpus.set(no_read_only=1)
    pools.export(mirror, [2])
    # When blocks are fetched
    importing.importer.fetch(pools.host.ref([2], [0], tokens=1), importing.copy)
    # Then they are there, and their owner's memory is as safe from this process as ever
    assert importing.numbers(1) == [3]
    assert [mapping.pinned for mapping in importing.mappings] == [True]
    _, start, nbytes, read_only = pools.runtime.log[-1]
    assert (nbytes, read_only) == (pools.layout.nbytes, False)
    assert permissions(start) == permissions(start + nbytes - 1) == "r--s"
    assert mapped() == 2  # in one piece each


def test_what_may_not_be_made_writable_goes_unpinned(
    pools: Pools,
    mirror: Mirror,
    importing: Importing,
    gpus: FakeGpus,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given a peer of another user, whose files can only be read
    gpus.set(no_read_only=1)
    opened = os.open

    def for_reading(path: Any, flags: int, *mode: int) -> int:
        if str(path).endswith(".kv") and flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied")
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", for_reading)
    pools.export(mirror, [2])
    importing.importer.fetch(pools.host.ref([2], [0], tokens=1), importing.copy)
    assert importing.numbers(1) == [3]
    assert [mapping.pinned for mapping in importing.mappings] == [False]
    assert "cannot be made writable: Permission denied" in caplog.text
    importing.importer.forget("peer")
    assert [entry[0] for entry in pools.runtime.log] == ["register"]  # the owner's


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch, layout: KvLayout) -> int:
    """Memory is pinned in the least pieces that there can be; their number."""
    monkeypatch.setattr(copies, "PIECE_NBYTES", 1)
    number, rest = divmod(layout.num_blocks, copies.piece(layout.block_nbytes))
    assert (number > 1, rest) == (True, 0)
    return number


def test_memory_is_pinned_piece_by_piece_and_no_copy_reaches_from_one_into_the_next(
    pieces: int, pools: Pools, importing: Importing
) -> None:
    blocks = list(range(pools.layout.num_blocks))
    with closing(Mirror(pools.tensor, pools.host, pools.runtime, 0)) as mirror:
        assert [entry[0] for entry in pools.runtime.log] == ["register"] * pieces
        pools.export(mirror, blocks)
        assert pools.wrong(blocks) == []
        importing.importer.fetch(pools.host.ref(blocks, [0] * 8, tokens=32), importing.copy)
        assert importing.numbers(8) == [1 + block for block in blocks]
        importing.mappings.clear()
        importing.importer.forget("peer")
    names = [entry[0] for entry in pools.runtime.log]
    assert names == ["register"] * 2 * pieces + ["unregister"] * 2 * pieces


def test_a_piece_that_cannot_be_pinned_leaves_none_pinned(pieces: int, pools: Pools) -> None:
    class Half(Watched):
        def host_register(self, pointer: int, nbytes: int, read_only: bool = False) -> None:
            if sum(entry[0] == "register" for entry in self.log) == pieces // 2:
                raise CudaError("cudaHostRegister", 2, "cudaErrorMemoryAllocation")
            super().host_register(pointer, nbytes, read_only)

    runtime = Half()
    with closing(Mirror(pools.tensor, pools.host, runtime, 0)) as mirror:
        assert not mirror.pinned
        assert [entry[0] for entry in runtime.log] == ["register"] * (pieces // 2) + ["unregister"] * (pieces // 2)
        pools.export(mirror, [0, 1, 2, 3])
        assert pools.wrong([0, 1, 2, 3]) == []


@pytest.mark.parametrize("broken", [700, 719])
def test_a_device_that_breaks_leaves_no_mapping(
    pools: Pools, watched: Watched, gpus: FakeGpus, shm_dir: Path, mapped: Callable[[], int], broken: int
) -> None:
    gpus.set(fail=f"cudaHostRegister={broken}")
    with pytest.raises(CudaError, match=str(broken)):
        PinnedMapping.open(pools.host.ref([1], [0], tokens=1), runtime=watched, device=0, shm_dir=shm_dir)
    assert mapped() == 1


def test_what_cannot_be_mapped_is_not_pinned(pools: Pools, watched: Watched, shm_dir: Path) -> None:
    ref = pools.host.ref([1], [0], tokens=1)
    wrong = replace(ref, segment=replace(ref.segment, offset=0))
    with pytest.raises(BadKvRef):
        PinnedMapping.open(wrong, runtime=watched, device=0, shm_dir=shm_dir)
    pools.host.path.unlink()
    with pytest.raises(SegmentGone):
        PinnedMapping.open(ref, runtime=watched, device=0, shm_dir=shm_dir)
    assert watched.log == []


def test_a_peer_s_memory_that_cannot_be_unpinned_stays_mapped(
    pools: Pools, watched: Watched, shm_dir: Path, mapped: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck: list[torch.Tensor] = []
    monkeypatch.setattr(pins, "STUCK", stuck)
    mapping = PinnedMapping.open(pools.host.ref([1], [0], tokens=1), runtime=watched, device=0, shm_dir=shm_dir)
    watched.unregister_fails = True
    with pytest.raises(CudaError, match="cudaHostUnregister"):
        mapping.close()
    gc.collect()
    assert is_mapped(stuck[0].data_ptr())
    watched.unregister_fails = False
    watched.host_unregister(stuck.pop().data_ptr())
    assert mapped() == 1
