"""What `prelay serve` plans to run, and in which order it stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from prelay.errors import ChildFailed
from prelay.fleet import Fleet, Plan
from prelay.report import Report
from prelay.roles import files_folder
from prelay.settings import load
from prelay.sizing import Sizes
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
