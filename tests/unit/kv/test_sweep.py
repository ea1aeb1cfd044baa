"""The sweep: dead owners' files go, everything else stays."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from prelay_kv import shmfile
from prelay_kv import sweep as sweeping
from prelay_kv.layout import KvLayout
from prelay_kv.shm import ShmPool
from prelay_kv.sweep import still_mapped, sweep


def _left_behind(shm_dir: Path, layout: KvLayout, owner: str = "dead") -> Path:
    pool = ShmPool.create(owner, layout, shm_dir)
    pool.close(unlink=False)
    return pool.path


def test_a_dead_owner_s_file_goes_and_a_live_owner_s_stays(shm_dir: Path, layout: KvLayout) -> None:
    dead = _left_behind(shm_dir, layout)
    with closing(ShmPool.create("alive", layout, shm_dir)) as alive:
        alive.tensor.fill_(3)
        assert sweep(shm_dir) == (dead.name,)
        assert sweep(shm_dir) == ()
        assert alive.path.exists()
        assert alive.tensor.eq(3).all()
    assert not dead.exists()


def test_an_unfinished_file_of_an_owner_that_died_while_starting_goes_too(shm_dir: Path) -> None:
    fd, path = shmfile.create_locked(shm_dir, "starting")
    os.close(fd)
    assert sweep(shm_dir) == (path.name,)


def test_what_is_not_a_pool_file_is_left_alone(shm_dir: Path, tmp_path: Path) -> None:
    # Given neighbours: another program's file, and a folder, a pipe and a link that only look like pools
    target = tmp_path / "target"
    target.touch()
    others = [shm_dir / name for name in ("torch_1_2", "prelay-a.kv", "prelay-b.kv", "prelay-c.kv", "prelay-d.kv.tmp")]
    others[0].touch()
    others[1].mkdir()
    os.mkfifo(others[2])
    others[3].symlink_to(target)
    others[4].touch()
    # When swept, then all are still there
    assert sweep(shm_dir) == ()
    assert all(path.is_symlink() or path.exists() for path in others)
    assert target.exists()
    others[1].rmdir()
    for path in (others[0], *others[2:]):
        path.unlink()


def test_a_folder_that_is_not_there_has_nothing_to_sweep(tmp_path: Path) -> None:
    assert sweep(tmp_path / "none") == ()


def test_two_sweeps_at_once_remove_each_file_once(shm_dir: Path, layout: KvLayout) -> None:
    dead = {_left_behind(shm_dir, layout).name for _ in range(40)}
    with closing(ShmPool.create("alive", layout, shm_dir)) as alive, ThreadPoolExecutor(2) as threads:
        start = threading.Barrier(2)

        def one() -> tuple[str, ...]:
            start.wait()
            return sweep(shm_dir)

        first, second = (job.result() for job in [threads.submit(one), threads.submit(one)])
        assert alive.path.exists()
    assert sorted(first + second) == sorted(dead)


def test_a_sweep_that_gets_the_lock_after_another_has_removed_the_file_claims_nothing(
    shm_dir: Path, layout: KvLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = _left_behind(shm_dir, layout)

    def beaten(fd: int) -> bool:
        dead.unlink()
        return shmfile.try_lock(fd)

    monkeypatch.setattr(sweeping, "try_lock", beaten)
    assert sweep(shm_dir) == ()


def test_a_name_that_now_is_another_owner_s_file_is_left_alone(
    shm_dir: Path, layout: KvLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = _left_behind(shm_dir, layout, owner="a-dead-one-that-comes-first")
    with closing(ShmPool.create("alive", layout, shm_dir)) as alive:

        def replaced(fd: int) -> bool:
            alive.path.rename(dead)
            return shmfile.try_lock(fd)

        monkeypatch.setattr(sweeping, "try_lock", replaced)
        assert sweep(shm_dir) == ()
        assert dead.exists()
        dead.rename(alive.path)


def test_an_owner_whose_new_file_is_swept_before_it_is_locked_makes_another(
    shm_dir: Path, layout: KvLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[tuple[str, ...]] = []

    def sweep_first(fd: int) -> bool:
        if not swept:
            swept.append(sweep(shm_dir))
        return shmfile_try_lock(fd)

    shmfile_try_lock = shmfile.try_lock
    monkeypatch.setattr(shmfile, "try_lock", sweep_first)
    with closing(ShmPool.create("w", layout, shm_dir)) as pool:
        assert len(swept[0]) == 1
        assert pool.path.name not in swept[0]
        assert pool.path.exists()
        assert sweep(shm_dir) == ()


def test_an_owner_that_finds_its_new_file_locked_by_a_sweep_makes_another(
    shm_dir: Path, layout: KvLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []

    def sweep_holds_it(fd: int) -> bool:
        if not held:
            (path,) = shm_dir.glob("*.kv")
            held.append(os.open(path, os.O_RDONLY))
            assert shmfile_try_lock(held[0])
        return shmfile_try_lock(fd)

    shmfile_try_lock = shmfile.try_lock
    monkeypatch.setattr(shmfile, "try_lock", sweep_holds_it)
    with closing(ShmPool.create("w", layout, shm_dir)) as pool:
        os.close(held[0])  # a sweep that died here; the next one removes the file
        (left,) = sweep(shm_dir)
        assert left != pool.path.name
        assert pool.path.exists()


@contextmanager
def _mapped_by_a_peer(path: Path) -> Iterator[int]:
    """As a process that has mapped the blocks which the file stands for."""
    fd = os.open(path, os.O_RDONLY)
    try:
        shmfile.hold(fd)
        yield fd
    finally:
        os.close(fd)


def test_a_dead_owner_s_blocks_are_still_mapped_until_the_last_peer_has_let_them_go(
    shm_dir: Path, layout: KvLayout
) -> None:
    dead, other = (_left_behind(shm_dir, layout, owner) for owner in ("dead", "other"))
    with _mapped_by_a_peer(dead) as first:
        with _mapped_by_a_peer(dead):
            assert still_mapped(shm_dir) == (dead.name,)
            shmfile.let_go(first)
            assert still_mapped(shm_dir) == (dead.name,)
        assert still_mapped(shm_dir) == ()
    assert set(sweep(shm_dir)) == {dead.name, other.name}


def test_a_peer_that_is_killed_has_nothing_mapped_any_more(shm_dir: Path, layout: KvLayout) -> None:
    dead = _left_behind(shm_dir, layout)
    code = (
        "import os, sys; from prelay_kv.shmfile import hold; hold(os.open(sys.argv[1], os.O_RDONLY)); "
        "print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(dead)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as peer:
        assert peer.stdout is not None
        peer.stdout.readline()
        assert still_mapped(shm_dir) == (dead.name,)
        peer.kill()
        peer.wait()
        assert still_mapped(shm_dir) == ()
    sweep(shm_dir)


def test_what_a_living_owner_s_peers_have_mapped_is_nobody_s_concern(shm_dir: Path, layout: KvLayout) -> None:
    with closing(ShmPool.create("alive", layout, shm_dir)) as alive, _mapped_by_a_peer(alive.path):
        assert still_mapped(shm_dir) == ()


def test_looking_for_what_is_mapped_holds_no_sweep_up(shm_dir: Path, layout: KvLayout) -> None:
    dead = _left_behind(shm_dir, layout)
    with _mapped_by_a_peer(dead):
        assert still_mapped(shm_dir) == (dead.name,)
        assert sweep(shm_dir) == (dead.name,)
        assert still_mapped(shm_dir) == (), "there is no file by which it could be told"


def test_what_is_no_pool_file_is_mapped_by_nobody(shm_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "target").touch()
    (shm_dir / "prelay-a.kv").mkdir()
    os.mkfifo(shm_dir / "prelay-b.kv")
    (shm_dir / "prelay-c.kv").symlink_to(tmp_path / "target")
    with _mapped_by_a_peer(tmp_path / "target"):
        assert still_mapped(shm_dir) == ()
    (shm_dir / "prelay-a.kv").rmdir()
    for name in ("prelay-b.kv", "prelay-c.kv"):
        (shm_dir / name).unlink()
    assert still_mapped(tmp_path / "none") == ()
