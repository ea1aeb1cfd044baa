"""The importer beside an exporter in the same process; two processes are in tests/integration."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from prelay_kv.errors import BadKvRef, LayoutMismatch, NoAccess, SegmentGone, StaleKv
from prelay_kv.importer import Importer
from prelay_kv.layout import KvLayout
from prelay_kv.mapping import PeerMapping
from prelay_kv.peerfile import PeerFile
from prelay_kv.ref import KvRef
from prelay_kv.segment import domain
from prelay_kv.shm import ShmPool
from prelay_kv.shmfile import Parts, try_lock
from prelay_kv.sweep import sweep


@pytest.fixture
def pool(shm_dir: Path, layout: KvLayout) -> Iterator[ShmPool]:
    """Each element holds the number of its block."""
    pool = ShmPool.create("peer", layout, shm_dir)
    for block in range(layout.num_blocks):
        pool.tensor[block] = block
    yield pool
    pool.close()


@pytest.fixture
def importer(shm_dir: Path, layout: KvLayout) -> Iterator[Importer]:
    importer = Importer(layout.layout_hash, layout.numerics_hash, domain(shm_dir), shm_dir)
    yield importer
    importer.close()


def a_ref(pool: ShmPool, *blocks: int) -> KvRef:
    return pool.ref(blocks, pool.generations[list(blocks)], tokens=1)


class Taken:
    """A copy function that keeps what it copied, block by block."""

    def __init__(self, after: Callable[[], object] = lambda: None) -> None:
        self.blocks: list[torch.Tensor] = []
        self._after = after

    def __call__(self, pool: torch.Tensor, blocks: tuple[int, ...]) -> None:
        self.blocks = [pool[block].clone() for block in blocks]
        self._after()

    def numbers(self) -> list[float]:
        for block in self.blocks:
            assert block.eq(block.flatten()[0]).all()
        return [block.flatten()[0].item() for block in self.blocks]


def test_the_blocks_named_are_copied_in_order(pool: ShmPool, importer: Importer) -> None:
    taken = Taken()
    importer.fetch(a_ref(pool, 6, 0, 3), taken)
    assert taken.numbers() == [6, 0, 3]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_copy_sees_the_whole_pool_in_its_shape(
    shm_dir: Path, layout: KvLayout, importer: Importer, dtype: str
) -> None:
    seen = []
    with closing(ShmPool.create("peer", replace(layout, dtype=dtype), shm_dir)) as pool:
        importer.fetch(a_ref(pool, 1), lambda tensor, blocks: seen.append((tensor.shape, tensor.dtype, blocks)))
    assert seen == [((8, 2, 2, 2, 4, 8), getattr(torch, dtype), (1,))]


def test_a_segment_is_mapped_once(pool: ShmPool, importer: Importer, mapped: Callable[[], int]) -> None:
    before = mapped()
    for block in range(8):
        importer.fetch(a_ref(pool, block), Taken())
    assert mapped() == before + 1
    assert importer.owners() == {"peer"}
    assert "1 segments mapped, 0 copies" in repr(importer)


def test_what_the_owner_writes_after_the_mapping_is_seen(pool: ShmPool, importer: Importer) -> None:
    importer.fetch(a_ref(pool, 2), Taken())
    pool.generations[2] += 1
    pool.tensor[2] = 99
    taken = Taken()
    importer.fetch(a_ref(pool, 2), taken)
    assert taken.numbers() == [99]


def test_a_block_handed_out_again_during_the_copy_is_stale(pool: ShmPool, importer: Importer) -> None:
    def reuse() -> None:
        pool.generations[[1, 4]] += 1

    with pytest.raises(StaleKv) as caught:
        importer.fetch(a_ref(pool, 0, 1, 2, 4), Taken(after=reuse))
    assert caught.value.blocks == (1, 4)


def test_a_block_handed_out_again_before_the_copy_is_stale(pool: ShmPool, importer: Importer) -> None:
    ref = a_ref(pool, 0, 1)
    pool.generations[0] += 1
    with pytest.raises(StaleKv):
        importer.fetch(ref, Taken())


def test_other_blocks_may_be_handed_out_during_the_copy(pool: ShmPool, importer: Importer) -> None:
    def reuse() -> None:
        pool.generations[5:] += 1

    importer.fetch(a_ref(pool, 0, 1), Taken(after=reuse))


def test_the_largest_generation_is_compared_exactly(pool: ShmPool, importer: Importer) -> None:
    pool.generations[3] = 2**64 - 1
    importer.fetch(a_ref(pool, 3), Taken())
    ref = replace(a_ref(pool, 3), generations=(2**64 - 2,))
    with pytest.raises(StaleKv):
        importer.fetch(ref, Taken())


def test_an_importer_that_asks_for_no_numerics_reads_a_peer_of_other_numerics(shm_dir: Path, layout: KvLayout) -> None:
    importer = Importer(layout.layout_hash, None, domain(shm_dir), shm_dir)
    with (
        closing(importer),
        closing(ShmPool.create("peer", replace(layout, numerics_hash="other"), shm_dir)) as pool,
    ):
        taken = Taken()
        importer.fetch(a_ref(pool, 0), taken)
        assert importer.owners() == {"peer"}


@pytest.mark.parametrize("field", ["layout_hash", "numerics_hash"])
def test_a_peer_of_another_layout_or_numerics_is_refused_before_its_memory_is_mapped(
    shm_dir: Path, layout: KvLayout, importer: Importer, field: str
) -> None:
    changed: Any = {field: "other"}
    with closing(ShmPool.create("peer", replace(layout, **changed), shm_dir)) as pool:
        with pytest.raises(LayoutMismatch, match="other") as caught:
            importer.fetch(a_ref(pool, 0), Taken())
        assert f"{caught.value.which}_hash" == field
        assert importer.owners() == frozenset()


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("node", "elsewhere", SegmentGone),
        ("kind", "cuda_ipc", NoAccess),
        ("handle", "prelay-nobody-0000.kv", SegmentGone),
        ("handle", "../prelay-peer.kv", BadKvRef),
        ("handle", "/etc/passwd", BadKvRef),
        ("handle", "prelay-a/../../x.kv", BadKvRef),
        ("handle", "x.kv", BadKvRef),
        ("owner", "somebody else", BadKvRef),
        ("device", "cuda", BadKvRef),
        ("offset", 4096, BadKvRef),
    ],
)
@pytest.mark.parametrize("mapped_before", [False, True])
def test_a_segment_that_says_something_else_is_refused(
    pool: ShmPool, importer: Importer, field: str, value: Any, error: type[Exception], mapped_before: bool
) -> None:
    ref = a_ref(pool, 0)
    if mapped_before:
        importer.fetch(ref, Taken())
    bad = replace(ref, segment=replace(ref.segment, **{field: value}))
    with pytest.raises(error):
        importer.fetch(bad, Taken())
    importer.fetch(ref, Taken())


def test_a_layout_of_equal_size_but_other_shape_is_refused(pool: ShmPool, importer: Importer) -> None:
    ref = a_ref(pool, 0)
    swapped = replace(ref, layout=replace(ref.layout, layers=4, head_dim=4))
    assert swapped.layout.nbytes == ref.layout.nbytes
    for _ in range(2):  # before and after the segment is mapped
        with pytest.raises(BadKvRef) as caught:
            importer.fetch(swapped, Taken())
        assert KvRef.decode(caught.value.raw) == swapped
        importer.fetch(ref, Taken())


def test_forgetting_a_peer_unmaps_it(pool: ShmPool, importer: Importer, mapped: Callable[[], int]) -> None:
    before = mapped()
    importer.fetch(a_ref(pool, 0), Taken())
    importer.forget("somebody else")
    assert mapped() == before + 1
    importer.forget("peer")
    importer.forget("peer")
    assert mapped() == before
    assert importer.owners() == frozenset()


def test_a_closed_owner_s_memory_is_given_back_when_it_is_forgotten(
    pool: ShmPool, importer: Importer, mapped: Callable[[], int]
) -> None:
    ref = a_ref(pool, 4)
    importer.fetch(ref, Taken())
    pool.close()
    # Given no file any more, but the mapping: what it left is still whole
    taken = Taken()
    importer.fetch(ref, taken)
    assert taken.numbers() == [4]
    assert mapped() == 1
    importer.forget("peer")
    assert mapped() == 0
    with pytest.raises(SegmentGone, match="No such file"):
        importer.fetch(ref, Taken())


def test_a_peer_forgotten_during_a_copy_stays_mapped_until_the_copy_has_ended(
    pool: ShmPool, importer: Importer, mapped: Callable[[], int]
) -> None:
    copying, forgotten = threading.Event(), threading.Event()
    taken = Taken()

    def slow(tensor: torch.Tensor, blocks: tuple[int, ...]) -> None:
        copying.set()
        assert forgotten.wait(30)
        taken(tensor, blocks)

    before = mapped()
    with ThreadPoolExecutor(1) as threads:
        job = threads.submit(importer.fetch, a_ref(pool, 7, 1), slow)
        assert copying.wait(30)
        importer.forget("peer")
        assert importer.owners() == frozenset()
        assert mapped() == before + 1
        forgotten.set()
        job.result()
    assert taken.numbers() == [7, 1]
    assert mapped() == before


def test_two_copies_on_a_forgotten_peer_unmap_it_with_the_second(
    pool: ShmPool, importer: Importer, mapped: Callable[[], int]
) -> None:
    both, ends = threading.Barrier(3), [threading.Event(), threading.Event()]
    before = mapped()

    def copy_until(end: threading.Event) -> None:
        def slow(tensor: torch.Tensor, blocks: tuple[int, ...]) -> None:
            both.wait(30)
            assert end.wait(30)

        importer.fetch(a_ref(pool, 0), slow)

    with ThreadPoolExecutor(2) as threads:
        jobs = [threads.submit(copy_until, end) for end in ends]
        both.wait(30)
        assert "2 copies running" in repr(importer)
        importer.close()
        for end, job, left in zip(ends, jobs, [1, 0], strict=True):
            end.set()
            job.result()
            assert mapped() == before + left


def test_a_copy_s_own_error_comes_out_and_leaves_no_use_counted(
    pool: ShmPool, importer: Importer, mapped: Callable[[], int]
) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("engine")

    before = mapped()
    with pytest.raises(ZeroDivisionError, match="engine"):
        importer.fetch(a_ref(pool, 0), fails)
    assert "0 copies" in repr(importer)
    importer.forget("peer")
    assert mapped() == before


def test_a_tensor_that_was_kept_stays_readable_after_its_owner_is_forgotten(pool: ShmPool, importer: Importer) -> None:
    kept: list[torch.Tensor] = []
    importer.fetch(a_ref(pool, 0), lambda tensor, _: kept.append(tensor))
    importer.forget("peer")
    assert kept[0][5].eq(5).all()


def test_a_closed_importer_takes_nothing_more(pool: ShmPool, importer: Importer) -> None:
    importer.close()
    importer.close()
    with pytest.raises(SegmentGone, match="closed"):
        importer.fetch(a_ref(pool, 0), Taken())


def test_fetches_and_forgets_from_many_threads_keep_the_bytes_right_and_leak_nothing(
    shm_dir: Path, layout: KvLayout, importer: Importer, mapped: Callable[[], int]
) -> None:
    pools = [ShmPool.create(f"peer {number}", layout, shm_dir) for number in range(3)]
    for number, pool in enumerate(pools):
        pool.tensor.fill_(number + 1)
    before = mapped()

    def fetch_all(rounds: int) -> None:
        for turn in range(rounds):
            number = turn % 3
            taken = Taken()
            importer.fetch(a_ref(pools[number], 0, 5), taken)
            assert taken.numbers() == [number + 1] * 2

    with ThreadPoolExecutor(4) as threads:
        jobs = [threads.submit(fetch_all, 120) for _ in range(3)]
        turn = 0
        while not all(job.done() for job in jobs):
            importer.forget(f"peer {turn % 3}")
            turn += 1
        for job in jobs:
            job.result()
    for number in range(3):
        importer.forget(f"peer {number}")
    assert mapped() == before
    for pool in pools:
        pool.close()


def test_a_file_cut_short_after_it_was_mapped_is_gone_and_kills_nobody(pool: ShmPool, importer: Importer) -> None:
    ref = a_ref(pool, 7)
    importer.fetch(ref, Taken())
    os.truncate(pool.path, 4096)
    with pytest.raises(SegmentGone, match="cut short"):
        importer.fetch(ref, Taken())


class Elsewhere(PeerMapping):
    """A transport of another kind: its blocks lie in no file."""

    def __init__(self, pool: ShmPool) -> None:
        self.closed = 0
        self._pool = pool

    def pool(self, ref: KvRef) -> torch.Tensor:
        return self._pool.tensor

    def generations(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self._pool.generations[list(blocks)].tolist())

    def is_orphaned(self) -> bool:
        return False

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def elsewhere(pool: ShmPool) -> Elsewhere:
    return Elsewhere(pool)


@pytest.fixture
def far_importer(shm_dir: Path, layout: KvLayout, elsewhere: Elsewhere) -> Iterator[Importer]:
    """Opens its one segment once; a second try finds nothing."""
    opened = iter([elsewhere])
    importer = Importer(
        layout.layout_hash,
        layout.numerics_hash,
        domain(shm_dir),
        shm_dir,
        openers={"elsewhere": lambda _: next(opened)},
    )
    yield importer
    importer.close()


def far_ref(pool: ShmPool, *blocks: int) -> KvRef:
    ref = a_ref(pool, *blocks)
    return replace(ref, segment=replace(ref.segment, kind="elsewhere", handle="0xbeef", device="cuda-uuid"))


def test_another_transport_plugs_in_by_its_kind(pool: ShmPool, elsewhere: Elsewhere, far_importer: Importer) -> None:
    ref, taken = far_ref(pool, 2, 3), Taken()
    far_importer.fetch(ref, taken)
    far_importer.fetch(ref, taken)
    assert taken.numbers() == [2, 3]
    with pytest.raises(StaleKv):
        far_importer.fetch(replace(ref, generations=(0, 9)), taken)
    assert elsewhere.closed == 0
    far_importer.close()
    assert elsewhere.closed == 1


def test_a_transport_is_closed_once_and_only_after_the_last_copy(
    pool: ShmPool, elsewhere: Elsewhere, far_importer: Importer
) -> None:
    seen: list[int] = []

    def forget() -> None:
        far_importer.forget("peer")
        seen.append(elsewhere.closed)

    far_importer.fetch(far_ref(pool, 1), Taken(after=forget))
    assert seen == [0]
    assert elsewhere.closed == 1
    far_importer.close()
    assert elsewhere.closed == 1


def test_a_peer_s_memory_is_an_orphan_when_it_has_died_and_not_before(
    shm_dir: Path, layout: KvLayout, pool: ShmPool, importer: Importer
) -> None:
    with closing(ShmPool.create("alive", layout, shm_dir)) as alive:
        importer.fetch(a_ref(pool, 0), Taken())
        importer.fetch(a_ref(alive, 0), Taken())
        assert importer.orphans() == frozenset()
        pool.close(unlink=False)
        assert importer.orphans() == {"peer"}
        assert importer.owners() == {"peer", "alive"}
        importer.forget("peer")
        assert importer.orphans() == frozenset()
    pool.path.unlink()


def test_a_dead_peer_whose_file_was_swept_is_still_known_to_be_dead(
    shm_dir: Path, pool: ShmPool, importer: Importer
) -> None:
    importer.fetch(a_ref(pool, 0), Taken())
    pool.close(unlink=False)
    assert sweep(shm_dir) == (pool.path.name,)
    assert importer.orphans() == {"peer"}


def test_orphans_can_be_told_while_a_copy_runs(pool: ShmPool, importer: Importer) -> None:
    seen: list[frozenset[str]] = []

    def dies() -> None:
        pool.close(unlink=False)
        seen.append(importer.orphans())

    importer.fetch(a_ref(pool, 0), Taken(after=dies))
    assert seen == [{"peer"}]
    pool.path.unlink()


@pytest.fixture
def file(shm_dir: Path, layout: KvLayout, pool: ShmPool) -> Iterator[PeerFile]:
    with closing(PeerFile.open(a_ref(pool, 0), Parts.of(layout), shm_dir)) as found:
        yield found


def test_a_file_has_an_owner_while_that_one_lives(shm_dir: Path, pool: ShmPool, file: PeerFile) -> None:
    assert not file.is_orphaned()
    pool.close(unlink=False)
    assert file.is_orphaned()
    # and asking has taken no lock that would stay
    assert sweep(shm_dir) == (pool.path.name,)
    assert file.is_orphaned()


def test_asking_whether_there_is_an_owner_does_not_take_the_file_from_it(pool: ShmPool, file: PeerFile) -> None:
    assert not file.is_orphaned()
    fd = os.open(pool.path, os.O_RDONLY)
    assert not try_lock(fd)
    os.close(fd)


def test_a_file_that_a_sweep_is_about_to_remove_is_told_a_moment_later(pool: ShmPool, file: PeerFile) -> None:
    pool.close(unlink=False)
    sweeping = os.open(pool.path, os.O_RDONLY)
    assert try_lock(sweeping)
    assert not file.is_orphaned()
    os.close(sweeping)
    assert file.is_orphaned()
    pool.path.unlink()


def test_a_file_that_is_closed_here_is_waited_for_by_nobody(file: PeerFile) -> None:
    file.close()
    assert file.is_orphaned()


class Slow(Elsewhere):
    """It takes long to open, and, once that is `stuck`, to close; what happens is noted."""

    def __init__(self, pool: ShmPool) -> None:
        super().__init__(pool)
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.opened = 0
        self.alive = True

    def open(self, _: KvRef) -> PeerMapping:
        self.opened += 1
        self.begun.set()
        assert self.go_on.wait(30)
        if not self.alive:
            raise SegmentGone("it could not be opened after all")
        return self

    def close(self) -> None:
        super().close()
        self.begun.set()
        assert self.go_on.wait(30)


@pytest.fixture
def slow(pool: ShmPool) -> Slow:
    return Slow(pool)


@pytest.fixture
def slow_importer(shm_dir: Path, layout: KvLayout, slow: Slow) -> Iterator[Importer]:
    importer = Importer(
        layout.layout_hash, layout.numerics_hash, domain(shm_dir), shm_dir, openers={"elsewhere": slow.open}
    )
    yield importer
    slow.go_on.set()
    importer.close()


def what_the_lease_thread_does(importer: Importer) -> tuple[frozenset[str], frozenset[str]]:
    found = importer.orphans(), importer.owners()
    importer.forget("peer")
    return found


def test_who_renews_leases_does_not_wait_for_a_mapping_that_takes_long_to_open(
    pool: ShmPool, slow: Slow, slow_importer: Importer
) -> None:
    with ThreadPoolExecutor(2) as threads:
        # Given a copy thread that pins a large pool
        copies = threads.submit(slow_importer.fetch, far_ref(pool, 1), Taken())
        assert slow.begun.wait(30)
        # When the lease thread asks and forgets, then it is answered at once
        leases = threads.submit(what_the_lease_thread_does, slow_importer)
        try:
            assert leases.result(timeout=10) == (frozenset(), frozenset({"peer"}))
        finally:
            slow.go_on.set()
        copies.result()
    # And what was forgotten meanwhile is closed by its last user
    assert (slow.opened, slow.closed) == (1, 1)


def test_copies_from_one_peer_do_not_wait_while_another_peer_s_memory_is_mapped(
    pool: ShmPool, slow: Slow, slow_importer: Importer
) -> None:
    with ThreadPoolExecutor(2) as threads:
        opening = threads.submit(slow_importer.fetch, far_ref(pool, 1), Taken())
        assert slow.begun.wait(30)
        taken = Taken()
        try:
            threads.submit(slow_importer.fetch, a_ref(pool, 3), taken).result(timeout=10)
        finally:
            slow.go_on.set()
        opening.result()
    assert taken.numbers() == [3]


def test_nobody_waits_for_a_mapping_that_takes_long_to_close(
    pool: ShmPool, slow: Slow, slow_importer: Importer
) -> None:
    slow.go_on.set()
    slow_importer.fetch(far_ref(pool, 1), Taken())
    slow.begun.clear()
    slow.go_on.clear()
    with ThreadPoolExecutor(2) as threads:
        forgets = threads.submit(slow_importer.forget, "peer")
        assert slow.begun.wait(30)
        try:
            assert threads.submit(slow_importer.owners).result(timeout=10) == frozenset()
        finally:
            slow.go_on.set()
        forgets.result()
    assert slow.closed == 1


def test_two_copies_that_come_together_open_one_mapping(pool: ShmPool, slow: Slow, slow_importer: Importer) -> None:
    with ThreadPoolExecutor(2) as threads:
        jobs = [threads.submit(slow_importer.fetch, far_ref(pool, block), Taken()) for block in (1, 2)]
        assert slow.begun.wait(30)
        slow.go_on.set()
        for job in jobs:
            job.result()
    assert slow.opened == 1
    slow_importer.close()
    assert slow.closed == 1


def test_a_mapping_that_could_not_be_opened_leaves_nothing_and_is_tried_again(
    pool: ShmPool, slow: Slow, slow_importer: Importer
) -> None:
    slow.go_on.set()
    slow.alive = False
    with pytest.raises(SegmentGone, match="after all"):
        slow_importer.fetch(far_ref(pool, 1), Taken())
    assert slow_importer.owners() == frozenset()
    slow.alive = True
    slow_importer.fetch(far_ref(pool, 1), Taken())
    assert slow.opened == 2


def test_a_process_that_may_open_no_more_files_is_to_blame_itself(pool: ShmPool, importer: Importer) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with pytest.raises(NoAccess, match="Too many open files"):
            importer.fetch(a_ref(pool, 0), Taken())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    importer.fetch(a_ref(pool, 0), Taken())
