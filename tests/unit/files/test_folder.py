"""What stands on disk of a batch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from prelay_files import folder as module
from prelay_files.errors import Damaged, FileMissing
from prelay_files.folder import BatchFolder
from prelay_files.ids import is_batch_id, is_file_id, new_batch_id, new_file_id
from prelay_files.record import BatchRecord


def record(**changes: object) -> BatchRecord:
    made = BatchRecord(new_batch_id(), "/v1/completions", new_file_id(), 3600, 1000, 4600, {"a": "b"})
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def test_a_record_is_read_back(tmp_path: Path) -> None:
    made = record()
    assert BatchFolder.create(tmp_path, made).record() == made
    assert BatchFolder(tmp_path, made.id).end() is None
    assert BatchRecord.decode(made.encode()) == made


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", record().encode().replace(b"3600", b'"3600"'), b"\xff"])
def test_what_is_no_record_is_told(raw: bytes) -> None:
    with pytest.raises(Damaged, match="not the record of a batch"):
        BatchRecord.decode(raw)


@pytest.mark.parametrize("name", ["../x", "", "batch_", "batch_" + "0" * 23 + "/", "batch_" + "0" * 24 + "\n"])
def test_what_is_no_id_is_no_batch(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileMissing):
        BatchFolder(tmp_path, name)


def test_batches_are_listed_newest_first_and_in_pages(tmp_path: Path) -> None:
    assert BatchFolder.list(tmp_path, limit=10) == []
    made = [record(id=f"batch_{at:024x}") for at in range(5)]
    for each in made:
        BatchFolder.create(tmp_path, each)
    (tmp_path / "batches" / f"batch_{9:024x}").mkdir()  # without a record
    damaged = BatchFolder.create(tmp_path, record(id=f"batch_{8:024x}"))
    (damaged.path / "record.json").write_bytes(b"{")
    assert BatchFolder.list(tmp_path, limit=10) == made[::-1]
    assert BatchFolder.list(tmp_path, limit=2, after=made[3].id) == [made[2], made[1]]


def test_those_without_an_end_are_unfinished(tmp_path: Path) -> None:
    one, two = (BatchFolder.create(tmp_path, record(id=f"batch_{at:024x}")) for at in range(2))
    one.write_end({"status": "failed"})
    assert [folder.id for folder in BatchFolder.unfinished(tmp_path)] == [two.id]


def test_a_removed_batch_leaves_nothing(tmp_path: Path) -> None:
    folder = BatchFolder.create(tmp_path, record())
    folder.remove()
    folder.remove()
    assert list((tmp_path / "batches").iterdir()) == []
    with pytest.raises(FileMissing):
        folder.record()
    with pytest.raises(FileMissing):
        folder.write_end({"status": "failed"})


def test_what_dead_processes_left_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert BatchFolder.sweep(tmp_path) == []
    over, going_on = BatchFolder.create(tmp_path, record()), BatchFolder.create(tmp_path, record())
    over.write_end({"status": "failed"})
    for folder in (over, going_on):
        (folder.path / "1").mkdir()
    half = tmp_path / "batches" / f".{new_batch_id()}.x"
    half.mkdir()
    assert BatchFolder.sweep(tmp_path) == [f"{over.id}/1"]
    monkeypatch.setattr(module, "STALE_S", -1.0)
    assert BatchFolder.sweep(tmp_path) == [half.name]
    assert going_on.epochs() == [1]


def test_a_cancel_is_noted_once_and_stays(tmp_path: Path) -> None:
    folder = BatchFolder.create(tmp_path, record())
    assert not folder.cancel_asked()
    folder.ask_cancel()
    folder.ask_cancel()
    assert folder.cancel_asked()
    folder.remove()
    with pytest.raises(FileMissing):
        folder.ask_cancel()


def test_who_reads_a_file_is_found_also_beside_a_record_that_cannot_be_read(tmp_path: Path) -> None:
    broken, over, first, last = (BatchFolder.create(tmp_path, record()) for _ in range(4))
    (broken.path / "record.json").write_bytes(b"{")
    over.write_end({"status": "failed"})
    for folder in (first, last):
        (folder.path / "record.json").write_bytes(dataclasses.replace(folder.record(), input_file_id="it").encode())
    assert BatchFolder.reader_of(tmp_path, "it") == min(first.id, last.id)
    assert BatchFolder.reader_of(tmp_path, over.record().input_file_id) is None


def test_ids_sort_by_age() -> None:
    assert is_file_id(new_file_id())
    assert is_batch_id(new_batch_id())
    assert not is_file_id(new_batch_id())
    times = [new_file_id()[5:17] for _ in range(20)]
    assert times == sorted(times)
