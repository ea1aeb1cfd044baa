"""A peer's pool on a GPU through the importer. This process is exporter and importer by turns, under two numbers.

Processes that really die are in tests/integration/test_cuda_processes.py.
"""

from __future__ import annotations

import functools
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from prelay_kv.cuda.copies import Copier
from prelay_kv.cuda.mapping import CudaMapping
from prelay_kv.cuda.pool import CudaPool
from prelay_kv.cuda.runtime import Cudart
from prelay_kv.errors import BadKvRef, CudaError, NoAccess, SegmentGone, StaleKv, StillMapped
from prelay_kv.importer import Importer
from prelay_kv.layout import KvLayout
from prelay_kv.peerfile import PeerFile
from prelay_kv.ref import KvRef
from prelay_kv.segment import domain
from prelay_kv.shm import ShmPool
from prelay_kv.shmfile import MAGIC, PAGE, CudaExport, Header, Parts, pack_header, read_header
from tests.bed.cudart import FakeGpus

MIB = 1 << 20
EXPORTER = 3


@pytest.fixture
def export(gpus: FakeGpus, runtime: Cudart, layout: KvLayout, shm_dir: Path) -> Iterator[Callable[[str], CudaPool]]:
    """Makes a pool as the process EXPORTER; each element holds the number of its block. Blocks are freed at the end."""
    pools: list[CudaPool] = []

    def make(owner: str = "peer") -> CudaPool:
        with gpus.elsewhere(EXPORTER):
            pool = CudaPool.create(owner, layout, runtime, 0, shm_dir, torch_device="cpu")
        for block in range(layout.num_blocks):
            pool.tensor[block] = block
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def pool(export: Callable[[str], CudaPool]) -> CudaPool:
    return export("peer")


@pytest.fixture
def open_(runtime: Cudart, shm_dir: Path) -> Callable[[KvRef], CudaMapping]:
    return functools.partial(CudaMapping.open, runtime=runtime, device=0, torch_device="cpu", shm_dir=shm_dir)


@pytest.fixture
def importer(
    pool: CudaPool, layout: KvLayout, shm_dir: Path, open_: Callable[[KvRef], CudaMapping]
) -> Iterator[Importer]:
    """Closed before the pools are, which then can be freed."""
    importer = Importer(layout.layout_hash, layout.numerics_hash, domain(shm_dir), shm_dir, openers={"cuda_ipc": open_})
    with closing(importer):
        yield importer


def a_ref(pool: CudaPool, *blocks: int) -> KvRef:
    return pool.ref(blocks, pool.generations[list(blocks)], tokens=1)


class Taken:
    """A copy into blocks of this process's own, by the device's stream; `numbers` are what the blocks hold."""

    def __init__(self, runtime: Cudart, layout: KvLayout, after: Callable[[], object] = lambda: None) -> None:
        self._copier = Copier(runtime, 0)
        self._layout = layout
        self._after = after
        self._blocks = torch.full(layout.shape, -1.0)
        self._count = 0

    def __call__(self, pool: torch.Tensor, blocks: tuple[int, ...]) -> None:
        self._count = len(blocks)
        here = range(self._count)
        self._copier.copy(pool.data_ptr(), blocks, self._blocks.data_ptr(), here, self._layout.block_nbytes)
        self._after()

    def numbers(self) -> list[float]:
        assert all(block.eq(block.flatten()[0]).all() for block in self._blocks)
        return [block.flatten()[0].item() for block in self._blocks[: self._count]]


@pytest.fixture
def taken(runtime: Cudart, layout: KvLayout) -> Taken:
    return Taken(runtime, layout)


def test_the_blocks_named_are_copied_in_order(pool: CudaPool, importer: Importer, taken: Taken) -> None:
    importer.fetch(KvRef.decode(a_ref(pool, 6, 0, 3).encode()), taken)
    assert taken.numbers() == [6, 0, 3]


def test_a_pool_is_mapped_once_and_the_owner_sees_that_it_is(
    pool: CudaPool, importer: Importer, taken: Taken, gpus: FakeGpus
) -> None:
    assert not pool.mapped()
    for block in range(8):
        importer.fetch(a_ref(pool, block), taken)
    assert gpus.spans() == 2
    assert pool.mapped()
    importer.forget("peer")
    assert gpus.spans() == 1
    assert not pool.mapped()


def test_the_copy_sees_the_whole_pool_in_its_shape(pool: CudaPool, importer: Importer, layout: KvLayout) -> None:
    seen: list[Any] = []
    importer.fetch(a_ref(pool, 1), lambda tensor, blocks: seen.append((tensor.shape, tensor.dtype, blocks)))
    assert seen == [(layout.shape, torch.float32, (1,))]


def test_a_block_handed_out_again_before_the_copy_was_synchronised_is_stale(
    pool: CudaPool, importer: Importer, runtime: Cudart, layout: KvLayout
) -> None:
    def reuse() -> None:
        pool.generations[[1, 4]] += 1
        pool.tensor[[1, 4]] = 99

    with pytest.raises(StaleKv) as caught:
        importer.fetch(a_ref(pool, 0, 1, 2, 4), Taken(runtime, layout, after=reuse))
    assert caught.value.blocks == (1, 4)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("handle", "prelay-nobody-0000.kv", SegmentGone),
        ("handle", "../prelay-peer.kv", BadKvRef),
        ("owner", "somebody else", BadKvRef),
        ("device", "cpu", BadKvRef),
        ("device", "cuda:GPU-0", BadKvRef),
        ("offset", 4096, BadKvRef),
    ],
)
@pytest.mark.parametrize("mapped_before", [False, True])
def test_a_segment_that_says_something_else_is_refused(
    pool: CudaPool,
    importer: Importer,
    taken: Taken,
    field: str,
    value: Any,
    error: type[Exception],
    mapped_before: bool,
) -> None:
    ref = a_ref(pool, 0)
    if mapped_before:
        importer.fetch(ref, taken)
    with pytest.raises(error):
        importer.fetch(replace(ref, segment=replace(ref.segment, **{field: value})), taken)
    importer.fetch(ref, taken)


def test_a_pool_on_the_host_is_not_opened_as_one_on_a_gpu(
    importer: Importer, layout: KvLayout, shm_dir: Path, taken: Taken
) -> None:
    with closing(ShmPool.create("peer", layout, shm_dir)) as host:
        ref = host.ref([0], [0], tokens=1)
        with pytest.raises(BadKvRef):
            importer.fetch(replace(ref, segment=replace(ref.segment, kind="cuda_ipc")), taken)


def rewrite(pool: CudaPool, **changes: Any) -> None:
    """Change what the pool's header says of its memory."""
    header = read_header(pool.path.read_bytes()[:PAGE])
    assert header.cuda is not None
    fd = os.open(pool.path, os.O_WRONLY)
    os.pwrite(fd, pack_header(replace(header, cuda=replace(header.cuda, **changes))), 0)
    os.close(fd)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"nbytes": 8192}, BadKvRef),
        ({"uuid": "GPU-other"}, BadKvRef),
        ({"stamp": "00" * 32}, SegmentGone),
        ({"handle": "00" * 64}, SegmentGone),
    ],
)
def test_a_header_that_says_something_else_of_the_memory_is_refused_and_leaves_nothing_mapped(
    pool: CudaPool,
    importer: Importer,
    taken: Taken,
    gpus: FakeGpus,
    changes: dict[str, Any],
    error: type[Exception],
) -> None:
    rewrite(pool, **changes)
    with pytest.raises(error):
        importer.fetch(a_ref(pool, 0), taken)
    assert gpus.spans() == 1
    assert importer.owners() == frozenset()
    assert not pool.mapped()


@pytest.mark.parametrize(
    "fields",
    [
        {"handle": "00" * 63},
        {"handle": "zz" * 64},
        {"handle": None},
        {"stamp": "00" * 33},
        {"stamp": 7},
        {"uuid": ""},
        {"nbytes": 0},
        {"nbytes": 1.5},
    ],
)
def test_an_export_that_cannot_be_one_is_refused(fields: dict[str, Any]) -> None:
    good: dict[str, Any] = {"handle": "00" * 64, "stamp": "00" * 32, "uuid": "GPU-1", "nbytes": 5}
    CudaExport(**good)
    with pytest.raises(ValueError, match=next(iter(fields))):
        CudaExport(**good | fields)


def test_a_header_with_another_field_about_the_memory_is_refused(layout: KvLayout) -> None:
    page = pack_header(Header("w", layout, CudaExport("00" * 64, "GPU-1", 5, "00" * 32)))
    assert read_header(page).cuda is not None
    with pytest.raises(ValueError, match="exactly the fields"):
        read_header(page.replace(b'"stamp"', b'"stomp"'))


# What the driver says, and what to do


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (1, "not visible here"),
        (2, "use fewer blocks"),
        (201, "process namespace"),
        (205, "all GPUs"),
        (217, "no peer-to-peer access.*pinned"),
        (304, "namespaces"),
        (400, "has ended"),
        (711, "pinned"),
        (801, "MIG.*pinned"),
        (999, r"cudaErrorUnknown \(999\)$"),
    ],
)
def test_a_handle_that_does_not_open_is_gone_with_what_to_do(
    pool: CudaPool, importer: Importer, taken: Taken, gpus: FakeGpus, code: int, advice: str
) -> None:
    gpus.set(fail=f"cudaIpcOpenMemHandle={code}")
    with pytest.raises(SegmentGone, match=advice) as found:
        importer.fetch(a_ref(pool, 0), taken)
    assert isinstance(found.value, NoAccess) == (code != 400), "who is to blame"
    gpus.set(fail=None)
    assert not pool.mapped()
    importer.fetch(a_ref(pool, 0), taken)


def test_the_exporting_process_itself_is_told_what_it_is(
    pool: CudaPool, importer: Importer, taken: Taken, gpus: FakeGpus
) -> None:
    with gpus.elsewhere(EXPORTER), pytest.raises(SegmentGone, match=r"201.*this very process"):
        importer.fetch(a_ref(pool, 0), taken)


def test_cards_without_peer_access_are_told_to_take_the_other_path(
    pool: CudaPool, gpus: FakeGpus, runtime: Cudart, shm_dir: Path
) -> None:
    gpus.set(devices=2, no_p2p="0-1")
    with pytest.raises(SegmentGone, match=r"217.*pinned path"):
        CudaMapping.open(a_ref(pool, 0), runtime=runtime, device=1, torch_device="cpu", shm_dir=shm_dir)
    runtime.set_device(0)


def test_a_device_that_is_broken_is_no_peer_s_fault(
    pool: CudaPool, importer: Importer, taken: Taken, gpus: FakeGpus
) -> None:
    gpus.set(fail="cudaIpcOpenMemHandle=700")
    with pytest.raises(CudaError) as caught:
        importer.fetch(a_ref(pool, 0), taken)
    assert caught.value.fatal
    gpus.set(fail=None)


def test_a_peer_on_another_card_is_read_by_one_s_own(
    pool: CudaPool, gpus: FakeGpus, runtime: Cudart, layout: KvLayout, shm_dir: Path
) -> None:
    gpus.set(devices=2)
    with closing(CudaMapping.open(a_ref(pool, 0), runtime=runtime, device=1, torch_device="cpu", shm_dir=shm_dir)) as m:
        assert m.pool(a_ref(pool, 0))[5].eq(5).all()
        # Of one process, one context maps it
        with pytest.raises(SegmentGone, match="mapped for device 1"):
            CudaMapping.open(a_ref(pool, 0), runtime=runtime, device=0, torch_device="cpu", shm_dir=shm_dir)
    runtime.set_device(0)


# Closing


def test_two_mappings_of_one_pool_share_the_handle_and_unmap_with_the_second(
    pool: CudaPool, open_: Callable[[KvRef], CudaMapping], gpus: FakeGpus
) -> None:
    first, second = open_(a_ref(pool, 0)), open_(a_ref(pool, 0))
    assert gpus.spans() == 2
    first.close()
    assert second.pool(a_ref(pool, 0))[7].eq(7).all()
    assert pool.mapped()
    second.close()
    assert gpus.spans() == 1
    assert not pool.mapped()


def test_a_mapping_is_not_closed_under_a_copy_that_was_only_enqueued(
    pool: CudaPool, open_: Callable[[KvRef], CudaMapping], runtime: Cudart, layout: KvLayout
) -> None:
    mapping, target, stream = open_(a_ref(pool, 5)), torch.zeros(layout.shape[1:]), runtime.stream_create()
    source = mapping.pool(a_ref(pool, 5))[5].data_ptr()
    runtime.copy_async(target.data_ptr(), source, layout.block_nbytes, stream)
    mapping.close()
    runtime.stream_synchronize(stream)
    assert target.eq(5).all()
    runtime.stream_destroy(stream)


def test_a_mapping_waits_for_its_own_device_from_any_thread(
    pool: CudaPool, gpus: FakeGpus, runtime: Cudart, layout: KvLayout, shm_dir: Path
) -> None:
    # Given a mapping for the second card, and a copy enqueued on it
    gpus.set(devices=2)
    ref = a_ref(pool, 5)
    mapping = CudaMapping.open(ref, runtime=runtime, device=1, torch_device="cpu", shm_dir=shm_dir)
    target, stream = torch.zeros(layout.shape[1:]), runtime.stream_create()
    runtime.copy_async(target.data_ptr(), mapping.pool(ref)[5].data_ptr(), layout.block_nbytes, stream)
    # When a thread closes it that has not chosen a device
    closer = threading.Thread(target=mapping.close)
    closer.start()
    closer.join()
    # Then the copy had ended before
    runtime.stream_synchronize(stream)
    assert target.eq(5).all()
    runtime.stream_destroy(stream)
    runtime.set_device(0)


def test_a_view_of_the_file_that_was_kept_holds_nothing_back(pool: CudaPool, shm_dir: Path, layout: KvLayout) -> None:
    file = PeerFile.open(a_ref(pool, 0), Parts.beside(layout), shm_dir)
    file.hold()
    kept = file.memory()
    assert pool.mapped()
    file.close()
    assert not pool.mapped()
    assert kept[:8] == MAGIC


def test_a_peer_forgotten_during_a_copy_stays_mapped_until_the_copy_has_ended(
    pool: CudaPool, importer: Importer, runtime: Cudart, layout: KvLayout, gpus: FakeGpus
) -> None:
    seen: list[int] = []

    def forget() -> None:
        importer.forget("peer")
        seen.append(gpus.spans())

    taken = Taken(runtime, layout, after=forget)
    importer.fetch(a_ref(pool, 7, 1), taken)
    assert (taken.numbers(), seen, gpus.spans()) == ([7, 1], [2], 1)


def test_an_owner_that_closes_while_it_is_mapped_leaves_its_peers_their_bytes(
    pool: CudaPool, importer: Importer, taken: Taken, gpus: FakeGpus, shm_dir: Path
) -> None:
    ref = a_ref(pool, 4)
    importer.fetch(ref, Taken(gpus.runtime, pool.layout))
    pool.close()
    importer.fetch(ref, taken)
    assert taken.numbers() == [4]
    assert list(shm_dir.iterdir()) == []
    importer.forget("peer")
    with pytest.raises(SegmentGone, match="No such file"):
        importer.fetch(ref, taken)
    gpus.reset()  # its owner's end gives the memory back


def test_a_peer_that_comes_between_the_removal_and_the_free_maps_nothing(
    pool: CudaPool, open_: Callable[[KvRef], CudaMapping], gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = a_ref(pool, 0)
    first = PeerFile.hold

    def close_and_hold(file: PeerFile) -> None:
        pool.close()
        first(file)

    monkeypatch.setattr(PeerFile, "hold", close_and_hold)
    with pytest.raises(SegmentGone, match="given up by its owner"):
        open_(ref)
    assert (gpus.spans(), gpus.used()) == (0, 0)


# The same handle for other memory


def handle(pool: CudaPool) -> str:
    export = read_header(pool.path.read_bytes()[:PAGE]).cuda
    assert export is not None
    return export.handle


def end(pool: CudaPool, runtime: Cudart) -> None:
    """What the end of its process does to a pool: the memory is its no more, mapped or not, and the lock is free."""
    runtime.free(pool.tensor.data_ptr())
    pool._drop_views()
    pool._file.close()


def test_the_same_handle_of_a_later_incarnation_gives_its_memory_and_never_the_old(
    export: Callable[[str], CudaPool],
    pool: CudaPool,
    importer: Importer,
    taken: Taken,
    gpus: FakeGpus,
    runtime: Cudart,
) -> None:
    # Given a mapped pool whose exporter has ended
    importer.fetch(a_ref(pool, 0), Taken(runtime, pool.layout))
    same = handle(pool)
    end(pool, runtime)
    # When a later one has the same handle
    later = export("later")
    later.tensor[2] = 222
    assert handle(later) == same
    # Then its own memory is read, and the old is not mapped any more
    importer.fetch(a_ref(later, 2), taken)
    assert taken.numbers() == [222]
    assert importer.owners() == {"later"}
    assert gpus.used() == 2 * MIB


def test_the_same_handle_is_refused_while_a_copy_runs_on_the_old_memory(
    export: Callable[[str], CudaPool], pool: CudaPool, importer: Importer, taken: Taken, runtime: Cudart
) -> None:
    late = Taken(runtime, pool.layout)

    def replaced() -> None:
        end(pool, runtime)
        later = export("later")
        later.tensor[2] = 222
        for _ in range(2):
            with pytest.raises(StillMapped) as caught:
                importer.fetch(a_ref(later, 2), late)
            assert caught.value.owner == "peer"
        refs.append(a_ref(later, 2))

    refs: list[KvRef] = []
    old = Taken(runtime, pool.layout, after=replaced)
    importer.fetch(a_ref(pool, 6), old)
    assert old.numbers() == [6]
    importer.fetch(refs[0], taken)
    assert taken.numbers() == [222]


def test_a_driver_that_still_has_the_old_memory_open_is_found_out_by_the_stamp(
    export: Callable[[str], CudaPool], pool: CudaPool, importer: Importer, taken: Taken, runtime: Cudart
) -> None:
    # Given a mapping of the old memory that others of this process made, torch say, and no registry of ours knows
    mapped = runtime.ipc_open(bytes.fromhex(handle(pool)))
    end(pool, runtime)
    later = export("later")
    with pytest.raises(SegmentGone, match="other memory"):
        importer.fetch(a_ref(later, 0), taken)
    runtime.ipc_close(mapped)
    importer.fetch(a_ref(later, 0), taken)


def test_nothing_of_a_refused_mapping_keeps_its_file(
    pool: CudaPool, open_: Callable[[KvRef], CudaMapping], mapped: Callable[[], int], gpus: FakeGpus
) -> None:
    before = mapped()
    gpus.set(fail="cudaStreamSynchronize=1")  # which says nothing about the peer's GPU
    with pytest.raises(SegmentGone, match=r"cudaStreamSynchronize: cudaErrorInvalidValue \(1\)$"):
        open_(a_ref(pool, 0))
    gpus.set(fail=None)
    gc.collect()
    assert mapped() == before
    assert gpus.spans() == 1
