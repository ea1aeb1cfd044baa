"""KV hand-over by CUDA IPC between real processes on fake GPUs: exporters and importers that are killed.

Only references and checksums go through a peer's socket; the bytes themselves can only come through the mapping. What
the fake does not have, and so is not seen here: real peer-to-peer traffic, kernels, and the driver's own moods.
"""

from __future__ import annotations

import gc
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from prelay_kv.cuda.pool import CudaPool
from prelay_kv.cuda.runtime import Cudart
from prelay_kv.errors import SegmentGone, StaleKv, StillMapped
from prelay_kv.importer import Importer
from prelay_kv.shmfile import PAGE, read_header
from prelay_kv.sweep import sweep
from tests.bed.cudart import FakeGpus, fake_gpus, library
from tests.bed.cudart_peer import LAYOUT, Copied, fill, importer
from tests.bed.cudart_peers import Peer, Peers, Refused

MIB = 1 << 20
#: Bytes of the allocation of a pool of LAYOUT.
POOL = 2 * MIB


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    with closing(Peers()) as found:
        yield found


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """A folder on /dev/shm; at the end nothing is in it, and this process has nothing of it open or mapped."""
    folder = Path("/dev/shm") / f"prelay-test-{secrets.token_hex(6)}"
    folder.mkdir()
    yield folder
    gc.collect()
    left = [path.name for path in folder.iterdir()]
    for name in left:
        (folder / name).unlink()
    folder.rmdir()
    assert left == []
    assert str(folder) not in Path("/proc/self/maps").read_text()
    descriptors = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [target for target in descriptors if target.is_relative_to(folder)]


@pytest.fixture
def gpus(tmp_path: Path) -> Iterator[FakeGpus]:
    folder = tmp_path / "gpus"
    folder.mkdir()
    with fake_gpus(folder) as found:
        yield found


@pytest.fixture
def start(peers: Peers, shm_dir: Path, gpus: FakeGpus) -> Iterator[Callable[..., Peer]]:
    """Starts a peer; at the end all are made to end, and what the killed left is swept."""
    started: list[Peer] = []

    def begin(**environment: str) -> Peer:
        started.append(Peer(peers, library(), shm_dir, **environment))
        return started[-1]

    yield begin
    for peer in started:
        peer.end()
    sweep(shm_dir)


@pytest.fixture
def exporter(start: Callable[..., Peer]) -> Peer:
    peer = start()
    peer.export("exporter")
    return peer


@pytest.fixture
def here(start: Callable[..., Peer], gpus: FakeGpus, shm_dir: Path) -> Iterator[Importer]:
    """The importer of this process, closed before the peers end."""
    with closing(importer(gpus.runtime, shm_dir)) as found:
        yield found


@pytest.fixture
def copied(gpus: FakeGpus) -> Copied:
    return Copied(gpus.runtime)


@pytest.fixture
def pool(start: Callable[..., Peer], gpus: FakeGpus, shm_dir: Path) -> Iterator[CudaPool]:
    """A pool of this process, for peers that import."""
    with closing(CudaPool.create("here", LAYOUT, gpus.runtime, 0, shm_dir, torch_device="cpu")) as found:
        yield found


def test_all_bytes_of_another_process_s_blocks_arrive(exporter: Peer, here: Importer, copied: Copied) -> None:
    here.fetch(exporter.ref, copied)
    assert copied.digests() == exporter.digests


def test_blocks_that_were_written_again_are_stale_and_the_new_ones_arrive(
    exporter: Peer, here: Importer, copied: Copied
) -> None:
    old = exporter.ref
    here.fetch(old, copied)
    exporter.refill()
    with pytest.raises(StaleKv):
        here.fetch(old, copied)
    here.fetch(exporter.ref, copied)
    assert copied.digests() == exporter.digests


class Midway(Cudart):
    """Does something once, between the enqueuing of a copy and its synchronisation."""

    def __init__(self, what: Callable[[], object]) -> None:
        super().__init__(library())
        self._what: Callable[[], object] | None = what

    def stream_synchronize(self, stream: int) -> None:
        what, self._what = self._what, None
        if what is not None:
            what()
        super().stream_synchronize(stream)


def test_an_owner_that_reuses_blocks_while_a_copy_is_enqueued_makes_them_stale(exporter: Peer, here: Importer) -> None:
    with pytest.raises(StaleKv):
        here.fetch(exporter.ref, Copied(Midway(exporter.refill)))


def test_an_owner_killed_while_it_is_mapped_leaves_its_blocks_readable_and_its_memory_pinned(
    exporter: Peer, here: Importer, copied: Copied, gpus: FakeGpus, shm_dir: Path
) -> None:
    here.fetch(exporter.ref, Copied(gpus.runtime))
    exporter.kill()
    assert sweep(shm_dir) == (exporter.ref.segment.handle,)
    here.fetch(exporter.ref, copied)
    assert copied.digests() == exporter.digests
    with pytest.raises(StaleKv):
        here.fetch(replace(exporter.ref, generations=(1,) * LAYOUT.num_blocks), copied)
    assert gpus.used() == POOL
    here.forget("exporter")
    assert gpus.used() == 0


def test_an_owner_killed_swept_and_forgotten_in_the_middle_of_a_copy_does_not_disturb_it(
    exporter: Peer, here: Importer, gpus: FakeGpus, shm_dir: Path
) -> None:
    def die() -> None:
        exporter.kill()
        here.forget("exporter")
        assert sweep(shm_dir) == (exporter.ref.segment.handle,)
        assert gpus.used() == POOL

    copied = Copied(Midway(die))
    here.fetch(exporter.ref, copied)
    assert copied.digests() == exporter.digests
    assert (gpus.used(), gpus.spans()) == (0, 0)


def test_an_owner_killed_before_it_was_mapped_is_gone(
    exporter: Peer, here: Importer, copied: Copied, shm_dir: Path
) -> None:
    exporter.kill()
    with pytest.raises(SegmentGone, match="no owner any more"):
        here.fetch(exporter.ref, copied)
    sweep(shm_dir)
    with pytest.raises(SegmentGone, match="No such file"):
        here.fetch(exporter.ref, copied)


def test_a_replacement_has_no_room_until_the_dead_one_s_memory_is_let_go(
    exporter: Peer, here: Importer, copied: Copied, gpus: FakeGpus, start: Callable[..., Peer]
) -> None:
    gpus.set(memory=POOL + MIB)
    here.fetch(exporter.ref, Copied(gpus.runtime))
    exporter.kill()
    replacement = start()
    with pytest.raises(Refused, match=r"GpuTooSmall: .* needs 2\.0 MiB on GPU 0, where 1\.0 MiB of 3\.0 MiB are free"):
        replacement.export("replacement")
    here.forget("exporter")
    replacement.export("replacement")
    here.fetch(replacement.ref, copied)
    assert copied.digests() == replacement.digests


def test_copy_threads_and_one_that_forgets_never_unmap_under_a_copy_and_leak_no_mapping(
    exporter: Peer, here: Importer, gpus: FakeGpus
) -> None:
    """The lease thread may take a living peer for lost: then the memory is mapped again."""

    def fetch_all() -> None:
        copied = Copied(gpus.runtime)
        for _ in range(60):
            here.fetch(exporter.ref, copied)
            assert copied.digests() == exporter.digests

    with ThreadPoolExecutor(3) as threads:
        jobs = [threads.submit(fetch_all) for _ in range(3)]
        while not all(job.done() for job in jobs):
            here.forget("exporter")
        for job in jobs:
            job.result()
    here.forget("exporter")
    assert gpus.spans() == 0


# The same handle, byte for byte, of a later process


def handle_of(peer: Peer, shm_dir: Path) -> str:
    cuda = read_header((shm_dir / peer.ref.segment.handle).read_bytes()[:PAGE]).cuda
    assert cuda is not None
    return cuda.handle


@pytest.fixture
def successors(start: Callable[..., Peer], shm_dir: Path) -> Callable[[Peer], Peer]:
    """Kills a process and gives its successor, with the same process number and the same handle."""

    def succeed(peer: Peer) -> Peer:
        handle = handle_of(peer, shm_dir)
        peer.kill()
        successor = start(FAKE_CUDART_PID="77")
        successor.export("successor")
        assert handle_of(successor, shm_dir) == handle
        return successor

    return succeed


@pytest.fixture
def first(start: Callable[..., Peer]) -> Peer:
    peer = start(FAKE_CUDART_PID="77")
    peer.export("first")
    return peer


def test_a_successor_with_the_handle_of_a_mapped_dead_one_gives_its_own_bytes(
    first: Peer, successors: Callable[[Peer], Peer], here: Importer, copied: Copied, gpus: FakeGpus
) -> None:
    here.fetch(first.ref, copied)
    successor = successors(first)
    assert gpus.used() == 2 * POOL
    here.fetch(successor.ref, copied)
    assert copied.digests() == successor.digests != first.digests
    assert here.owners() == {"successor"}
    assert gpus.used() == POOL


def test_a_successor_with_the_handle_that_a_running_copy_uses_waits_its_turn(
    first: Peer, successors: Callable[[Peer], Peer], here: Importer, copied: Copied, gpus: FakeGpus
) -> None:
    came: list[Peer] = []

    def replaced() -> None:
        came.append(successors(first))
        with pytest.raises(StillMapped):
            here.fetch(came[0].ref, Copied(gpus.runtime))

    old = Copied(Midway(replaced))
    here.fetch(first.ref, old)
    assert old.digests() == first.digests
    here.fetch(came[0].ref, copied)
    assert copied.digests() == came[0].digests


# Importers that die


def test_an_importer_killed_while_it_has_the_pool_mapped_lets_the_owner_free_it(
    pool: CudaPool, start: Callable[..., Peer], gpus: FakeGpus
) -> None:
    said, peer = fill(pool), start()
    assert peer.ask("fetch", said["ref"]) == said["digests"]
    assert pool.mapped()
    peer.kill()
    assert not pool.mapped()
    pool.close()
    assert gpus.used() == 0


def test_an_importer_killed_in_the_middle_of_a_copy_lets_the_owner_free_the_pool(
    pool: CudaPool, start: Callable[..., Peer], gpus: FakeGpus
) -> None:
    said, peer = fill(pool), start()
    assert peer.ask("enqueue", said["ref"]) == "enqueued"
    peer.kill()
    # What it had is as it was
    other = start()
    assert other.ask("fetch", said["ref"]) == said["digests"]
    other.kill()
    pool.close()
    assert gpus.used() == 0


# Owners that end well


def test_an_owner_that_closes_while_it_is_mapped_frees_nothing_under_its_peer(
    exporter: Peer, here: Importer, copied: Copied, gpus: FakeGpus, shm_dir: Path
) -> None:
    here.fetch(exporter.ref, Copied(gpus.runtime))
    assert exporter.ask("close") == POOL
    assert list(shm_dir.iterdir()) == []
    exporter.end()
    here.fetch(exporter.ref, copied)
    assert copied.digests() == exporter.digests
    here.forget("exporter")
    assert gpus.used() == 0


def test_an_owner_that_nobody_has_mapped_frees_its_blocks(exporter: Peer, here: Importer, copied: Copied) -> None:
    here.fetch(exporter.ref, copied)
    here.forget("exporter")
    assert exporter.ask("close") == 0


# Containers


def test_two_containers_whose_workers_have_one_process_number_are_told_what_to_share(
    start: Callable[..., Peer], here: Importer, copied: Copied, gpus: FakeGpus
) -> None:
    peer = start(FAKE_CUDART_PID="1")
    peer.export("peer")
    with gpus.elsewhere(1), pytest.raises(SegmentGone, match=r"\(201\).*process namespace"):
        here.fetch(peer.ref, copied)
    here.fetch(peer.ref, copied)


def test_a_container_without_the_peer_s_card_is_told_to_get_it(
    start: Callable[..., Peer], here: Importer, copied: Copied, gpus: FakeGpus
) -> None:
    gpus.set(devices=2)
    peer = start(FAKE_CUDART_VISIBLE="1")
    peer.export("peer")
    gpus.set(visible="0")
    with pytest.raises(SegmentGone, match=r"\(1\).*all GPUs"):
        here.fetch(peer.ref, copied)


def test_a_peer_on_another_card_is_read_where_the_cards_reach_each_other(
    start: Callable[..., Peer], here: Importer, copied: Copied, gpus: FakeGpus
) -> None:
    gpus.set(devices=2, no_p2p="0-1")
    peer = start(FAKE_CUDART_VISIBLE="1")
    peer.export("peer")
    with pytest.raises(SegmentGone, match=r"\(217\).*pinned path"):
        here.fetch(peer.ref, copied)
    gpus.set(no_p2p=None)
    here.fetch(peer.ref, copied)
    assert copied.digests() == peer.digests


def test_the_mapped_pool_is_a_tensor_of_the_peer_s_blocks(exporter: Peer, here: Importer) -> None:
    seen: list[tuple[torch.Size, torch.dtype]] = []
    here.fetch(exporter.ref, lambda pool, _: seen.append((pool.shape, pool.dtype)))
    assert seen == [(torch.Size(LAYOUT.shape), torch.bfloat16)]
