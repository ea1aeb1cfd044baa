"""The pool as its owner sees it."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from prelay_kv import owned, shmfile
from prelay_kv.errors import ShmTooSmall
from prelay_kv.layout import KvLayout
from prelay_kv.segment import SHM_DIR, domain
from prelay_kv.shm import ShmPool
from prelay_kv.shmfile import PAGE, Header, Parts, is_name, read_header, try_lock
from prelay_kv.sweep import sweep


def test_a_new_pool_is_zero_everywhere(shm_dir: Path, layout: KvLayout) -> None:
    with closing(ShmPool.create("w", layout, shm_dir)) as pool:
        assert pool.tensor.shape == layout.shape
        assert not pool.tensor.any()
        assert pool.generations.dtype == np.uint64
        assert pool.generations.tolist() == [0] * 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_tensor_and_the_generations_are_the_file(shm_dir: Path, layout: KvLayout, dtype: str) -> None:
    # Given a pool with something in its last block
    layout = replace(layout, dtype=dtype, num_blocks=700)  # a generation table of more than one page
    with closing(ShmPool.create("w", layout, shm_dir)) as pool:
        pool.tensor[699] = 1.5
        pool.generations[699] = 2**63
        # When the file is read as bytes
        data = pool.path.read_bytes()
    # Then both are where the segment says
    blocks = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype), offset=pool.segment.offset).view(
        layout.shape
    )
    assert blocks[699].eq(1.5).all()
    assert not blocks[:699].any()
    assert np.frombuffer(data, np.uint64, 700, PAGE).tolist() == [0] * 699 + [2**63]
    assert len(data) == Parts.of(layout).nbytes == pool.segment.offset + layout.nbytes
    assert pool.segment.offset % PAGE == 0


def test_the_file_is_private_locked_and_fully_allocated(shm_dir: Path, layout: KvLayout) -> None:
    with closing(ShmPool.create("w", layout, shm_dir)) as pool:
        found = pool.path.stat()
        assert stat.S_IMODE(found.st_mode) == 0o600
        assert found.st_blocks * 512 >= found.st_size == Parts.of(layout).nbytes
        fd = os.open(pool.path, os.O_RDONLY)
        assert not try_lock(fd)
        os.close(fd)


def test_the_segment_and_the_header_say_whose_it_is(shm_dir: Path, layout: KvLayout) -> None:
    with closing(ShmPool.create("prefill-1", layout, shm_dir)) as pool:
        assert read_header(pool.path.read_bytes()[:PAGE]) == Header("prefill-1", layout)
        segment = pool.segment
    assert (segment.owner, segment.device, segment.kind) == ("prefill-1", "cpu", "shm")
    assert (segment.node, segment.handle) == (domain(shm_dir), pool.path.name)
    assert (segment.layout_hash, segment.numerics_hash) == (layout.layout_hash, layout.numerics_hash)


def test_a_reference_takes_the_engine_s_numbers_as_they_are(shm_dir: Path, layout: KvLayout) -> None:
    with closing(ShmPool.create("w", layout, shm_dir)) as pool:
        ref = pool.ref([3, 1], pool.generations[[3, 1]], tokens=5)
    assert ref.blocks == (3, 1)
    assert ref.generations == (0, 0)
    ref.encode()


@pytest.mark.parametrize("owner", ["../../etc/passwd", "läufer 7", "a" * 256, "🧵" * 256, "w"])
def test_any_owner_gives_a_plain_file_name(shm_dir: Path, layout: KvLayout, owner: str) -> None:
    layout = replace(layout, layout_hash="🧵" * 256, numerics_hash="🧵" * 256)  # the longest header there is
    with closing(ShmPool.create(owner, layout, shm_dir)) as pool:
        assert pool.path.parent == shm_dir
        assert is_name(pool.path.name)
        assert read_header(pool.path.read_bytes()[:PAGE]).owner == owner
        assert pool.generations.tolist() == [0] * 8


def test_an_owner_without_a_name_is_refused(shm_dir: Path, layout: KvLayout) -> None:
    with pytest.raises(ValueError, match="owner"):
        ShmPool.create("", layout, shm_dir)


def test_pools_lie_in_dev_shm_by_default(layout: KvLayout) -> None:
    pool = ShmPool.create("test-default-folder", layout)
    assert pool.path.parent == SHM_DIR
    assert pool.path.exists()
    pool.close()
    assert not pool.path.exists()


def test_closing_twice_is_closing_once(shm_dir: Path, layout: KvLayout) -> None:
    pool = ShmPool.create("w", layout, shm_dir)
    assert "open" in repr(pool)
    pool.close()
    pool.close()
    assert "closed" in repr(pool)
    assert list(shm_dir.iterdir()) == []


def test_a_view_that_is_still_held_outlives_the_close(
    shm_dir: Path, layout: KvLayout, mapped: Callable[[], int]
) -> None:
    pool = ShmPool.create("w", layout, shm_dir)
    held = pool.tensor[2]
    pool.close()
    held += 1
    assert held.sum() == held.numel()
    assert mapped() == 1
    del held
    assert mapped() == 0


def test_a_pool_closed_without_unlink_is_left_to_the_sweep_even_while_a_view_is_held(
    shm_dir: Path, layout: KvLayout
) -> None:
    pool = ShmPool.create("w", layout, shm_dir)
    held = pool.tensor
    pool.close(unlink=False)
    assert pool.path.exists()
    assert sweep(shm_dir) == (pool.path.name,)
    assert not held.any()


def _twice_all_of_dev_shm(layout: KvLayout) -> KvLayout:
    space = os.statvfs(SHM_DIR)
    return replace(layout, num_blocks=2 * space.f_blocks * space.f_frsize // layout.block_nbytes)


def test_a_pool_larger_than_the_folder_is_refused_with_the_sizes(shm_dir: Path, layout: KvLayout) -> None:
    huge = _twice_all_of_dev_shm(layout)
    with pytest.raises(
        ShmTooSmall, match=r"needs \d+\.\d MiB in /dev/shm/.* of \d+\.\d MiB are free.*--shm-size"
    ) as caught:
        ShmPool.create("w", huge, shm_dir)
    assert caught.value.needed == Parts.of(huge).nbytes > caught.value.total >= caught.value.free > 0
    assert list(shm_dir.iterdir()) == []


def test_room_that_goes_between_the_question_and_the_reservation_is_the_same_error(
    shm_dir: Path, layout: KvLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owned, "_refuse_if_short", lambda *_: None)
    with pytest.raises(ShmTooSmall) as caught:
        ShmPool.create("w", _twice_all_of_dev_shm(layout), shm_dir)
    assert caught.value.total > 0
    assert list(shm_dir.iterdir()) == []


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("this container may not mount")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("ask_first", [True, False])
def test_a_folder_with_too_little_left_is_refused_and_keeps_what_was_free(
    small_tmpfs: Path, layout: KvLayout, monkeypatch: pytest.MonkeyPatch, ask_first: bool
) -> None:
    if not ask_first:
        monkeypatch.setattr(owned, "_refuse_if_short", lambda *_: None)
    # Given two thirds of the folder taken by a first pool
    layout = replace(layout, num_blocks=700_000 // layout.block_nbytes)
    with closing(ShmPool.create("first", layout, small_tmpfs)):
        free = os.statvfs(small_tmpfs).f_bavail
        # When a second of the same size is wanted
        with pytest.raises(ShmTooSmall) as caught:
            ShmPool.create("second", layout, small_tmpfs)
        # Then it names what is there, and takes nothing of it
        assert caught.value.total == 1 << 20
        assert caught.value.free == free * os.statvfs(small_tmpfs).f_frsize < caught.value.needed
        assert os.statvfs(small_tmpfs).f_bavail == free
        assert len(list(small_tmpfs.iterdir())) == 1
    # And the room of a closed pool can be had again
    ShmPool.create("third", layout, small_tmpfs).close()


def test_a_failure_after_the_file_was_made_leaves_nothing(
    shm_dir: Path, layout: KvLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(owned, "pack_header", fail)
    with pytest.raises(KeyboardInterrupt):
        ShmPool.create("w", layout, shm_dir)
    monkeypatch.setattr(shmfile, "try_lock", fail)
    with pytest.raises(KeyboardInterrupt):
        ShmPool.create("w", layout, shm_dir)
    assert list(shm_dir.iterdir()) == []


def test_a_lock_is_free_once_its_holder_has_closed(shm_dir: Path) -> None:
    fd, path = shmfile.create_locked(shm_dir, "w")
    other = os.open(path, os.O_RDONLY)
    assert not try_lock(other)
    os.close(fd)
    assert try_lock(other)
    fcntl.flock(other, fcntl.LOCK_UN)
    os.close(other)
    path.unlink()
