"""Batches run by real batch workers over null workers and a real Redis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prelay_worker.config import NullModel, Role
from tests.bed.batch import Batches, jsonl, lines
from tests.bed.processes import Fleet


@pytest.fixture
def batches(new_fleet: Fleet, tmp_path: Path) -> Iterator[Batches]:
    found = Batches(new_fleet.queue, tmp_path / "files")
    yield found
    found.close()


def start_workers(fleet: Fleet, null: NullModel = NullModel()) -> None:  # noqa: B008
    fleet.worker(Role.UNIFIED, null=null)


def test_a_batch_is_answered_line_by_line(new_fleet: Fleet, batches: Batches) -> None:
    start_workers(new_fleet)
    worker = new_fleet.batch_worker(batches.files_dir)
    asked = lines(200)
    batch = batches.create(jsonl(asked))
    state = batches.until_over(batch)
    assert state.status == "completed"
    batches.check(batch, asked)
    assert worker.stop() == 0
