"""What `prelay serve` plans to run, and in which order it stops."""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from prelay import fleet as fleets
from prelay.errors import ChildFailed
from prelay.fleet import Fleet, Plan
from prelay.report import Report
from prelay.roles import files_folder
from prelay.segments import mapped_segments, sweep_segments
from prelay.settings import load
from prelay.sizing import Sizes
from prelay_kv import shmfile
from prelay_queue.settings import QueueSettings


def plan(tmp_path: Path, **given: Any) -> Plan:
    settings = load({"state_dir": str(tmp_path / "state"), "redis_url": "redis://:hush@queue", **given}, None)
    return Plan(settings, tmp_path, "name", Sizes(10, 10, 1), None)


@pytest.mark.parametrize(
    ("given", "nice"),
    [({}, "10"), ({"decode_nice": "0"}, "0"), ({"unified": "1"}, "0"), ({"prefill": "0", "decode": "1"}, "0"),
     ({"null_model": "true"}, "0"), ({"null_model": "true", "decode_nice": "4"}, "4")],
)  # fmt: skip
def test_decode_workers_stand_back_where_prefill_workers_share_their_cores(
    tmp_path: Path, given: dict[str, str], nice: str
) -> None:
    assert plan(tmp_path, **given).environment(threads=1)["PRELAY_DECODE_NICE"] == nice


class Stopping:
    """Stands in for the supervisor: it only remembers."""

    def __init__(self) -> None:
        self.keepers: dict[str, Any] = {}
        self.stopped: list[list[str]] = []

    async def stop(self, names: list[str]) -> None:
        self.stopped.append(list(names))

    def close(self) -> None:
        pass


async def test_batch_workers_stop_after_the_api_and_before_the_workers_and_the_server(tmp_path: Path) -> None:
    fleet = Fleet(plan(tmp_path, batch="2", decode="2"), Report())
    fleet._supervisor, fleet._nursery = cast("Any", Stopping()), None
    await fleet._shut_down()
    assert cast("Any", fleet._supervisor).stopped == [
        ["api"],
        ["batch-0", "batch-1"],
        ["prefill-0", "decode-0", "decode-1"],
        ["nursery"],
        ["server"],
    ]


def test_files_are_in_the_state_directory_or_where_they_were_put_and_nowhere_without_batches(tmp_path: Path) -> None:
    name = "PRELAY_FILES_DIR"
    assert plan(tmp_path).environment(1)[name] == str(tmp_path / "state" / "files")
    assert plan(tmp_path, files_dir="/srv").environment(1)[name] == "/srv"
    assert name not in plan(tmp_path, batch="0").environment(1)
    # others may run batches in a folder that is named
    assert plan(tmp_path, batch="0", files_dir="/srv").environment(1)[name] == "/srv"


def test_each_model_has_a_folder_of_its_own(tmp_path: Path) -> None:
    settings = load({"files_dir": str(tmp_path)}, None)
    assert files_folder(settings, QueueSettings("redis://x", "one")) == tmp_path / "one"
    assert files_folder(settings, QueueSettings("redis://x", "two")) == tmp_path / "two"
    assert files_folder(load({}, None), QueueSettings("redis://x", "one")) is None


def test_a_batch_worker_that_cannot_run_ends_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = Fleet(plan(tmp_path), Report())
    spec = fleet.plan.batch_child("batch-0", fleet._batch_worker_gone)
    assert spec.command[-1] == "batch-worker"
    assert "hush" not in " ".join(spec.command)
    assert spec.given_up is not None
    spec.given_up(ChildFailed("batch-0 failed 9 times in a row"))
    assert "! batch-0 failed 9 times in a row; it is not started again" in capsys.readouterr().err


class Waiting:
    """A folder of segments, and each look that a starting prefill worker has had at it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.looks: list[tuple[str, ...]] = []
        self.looked = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        monkeypatch.setattr(fleets, "mapped_segments", self._look)
        monkeypatch.setattr(fleets, "sweep_segments", partial(sweep_segments, folder))
        monkeypatch.setattr(fleets, "UNMAP_CHECK_S", 0.001)

    def _look(self) -> tuple[str, ...]:
        self.looks.append(mapped_segments(self.folder))
        self._loop.call_soon_threadsafe(self.looked.set)
        return self.looks[-1]

    def segment(self, name: str) -> Path:
        path = self.folder / f"prelay-{name}.kv"
        path.touch()
        return path

    def left(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}


@pytest.fixture
async def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Waiting:
    return Waiting(tmp_path, monkeypatch)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR)
    try:
        yield fd
    finally:
        os.close(fd)


async def test_a_prefill_worker_starts_at_once_where_nobody_has_a_dead_ones_memory_mapped(waiting: Waiting) -> None:
    waiting.segment("dead")
    with opened(waiting.segment("alive")) as owner, opened(waiting.segment("alive")) as peer:
        fcntl.flock(owner, fcntl.LOCK_EX)
        shmfile.hold(peer)
        await fleets._sweep_first()
    assert waiting.looks == [()]
    assert waiting.left() == {"prelay-alive.kv"}


async def test_a_prefill_worker_starts_when_the_last_has_unmapped_a_dead_ones_memory(waiting: Waiting) -> None:
    dead = waiting.segment("dead")
    with opened(dead) as peer:
        shmfile.hold(peer)
        start = asyncio.create_task(fleets._sweep_first())
        await waiting.looked.wait()
        assert not start.done()
        assert waiting.left() == {dead.name}, "it says whose memory is mapped, so it goes last"
        shmfile.let_go(peer)
        await start
    assert waiting.looks[0] == (dead.name,)
    assert waiting.looks[-1] == ()
    assert waiting.left() == set()


async def test_a_prefill_worker_does_not_wait_for_ever_for_one_that_hangs(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets, "UNMAP_S", 0.05)
    dead = waiting.segment("dead")
    begun = time.monotonic()
    with opened(dead) as peer:
        shmfile.hold(peer)
        await fleets._sweep_first()
        assert time.monotonic() - begun >= 0.05
        assert waiting.looks[-1] == (dead.name,)
    assert waiting.left() == set()


def test_prefill_workers_wait_for_memory_and_others_need_none_of_a_dead_one(tmp_path: Path) -> None:
    found = plan(tmp_path)
    waits = {role: found.child(f"{role}-0", role, 1, 1).before_start for role in ("prefill", "decode", "api")}
    assert waits == {"prefill": fleets._sweep_first, "decode": None, "api": None}
