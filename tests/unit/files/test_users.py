"""Who uses a folder of files, and whether they have our queue."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from prelay_files.errors import FolderShared
from prelay_files.users import FolderUser, check_queue, living


def test_users_are_seen_while_they_live(tmp_path: Path) -> None:
    assert living(tmp_path) == []
    one, two = FolderUser(tmp_path, "h:1:a"), FolderUser(tmp_path, "h:2:b")
    assert sorted(living(tmp_path)) == ["h:1:a", "h:2:b"]
    one.close()
    assert living(tmp_path) == ["h:2:b"]
    two.close()
    assert list((tmp_path / "users").iterdir()) == []


def _use(root: Path, name: str) -> None:
    FolderUser(root, name)
    signal.pause()


def test_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_use, args=(tmp_path, "h:3:c"))
    process.start()
    until = time.monotonic() + 10
    while living(tmp_path) != ["h:3:c"] and time.monotonic() < until:
        time.sleep(0.01)
    assert living(tmp_path) == ["h:3:c"]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert living(tmp_path) == []
    assert list((tmp_path / "users").iterdir()) == []


def test_a_folder_whose_users_our_queue_knows_is_ours(tmp_path: Path) -> None:
    check_queue(tmp_path, lambda _: [], patience_s=0)
    user = FolderUser(tmp_path, "h:1:a")
    check_queue(tmp_path, lambda names: names, patience_s=0)
    user.close()


def test_a_stranger_is_refused_by_name_with_the_folder(tmp_path: Path) -> None:
    users = [FolderUser(tmp_path, "h:1:a"), FolderUser(tmp_path, "h:2:b")]
    with pytest.raises(FolderShared, match=f"files_dir {tmp_path} is used by API process h:2:b, of which this Redis"):
        check_queue(tmp_path, lambda _: ["h:1:a"], patience_s=0)
    for user in users:
        user.close()


def test_one_of_whom_our_queue_hears_later_is_none(tmp_path: Path) -> None:
    user = FolderUser(tmp_path, "h:1:a")
    looks = iter([[], [], ["h:1:a"]])

    def known(_: Sequence[str]) -> Sequence[str]:
        return next(looks)

    check_queue(tmp_path, known)
    user.close()
