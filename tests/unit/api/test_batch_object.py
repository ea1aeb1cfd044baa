"""A batch as the official client reads it, in every status."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from openai.types import Batch, FileObject

from prelay_api.batch_object import batch_object, file_object, page_of
from prelay_files.record import BatchRecord
from prelay_files.store import StoredFile
from prelay_queue.batches import BatchProgress, BatchState, BatchStatus

RECORD = BatchRecord("batch_1", "/v1/completions", "file-1", 3600, 1000, 4600)
STATE = BatchState(
    b"{}", BatchStatus.IN_PROGRESS, 3, "host:1:ab", False, "", "", "", BatchProgress(5, 3, 2, 40, 50),
    1000_000, 2000_999, 0, 0, 0, 6000_000, 1, 7,
)  # fmt: skip


def shown(**changes: Any) -> Batch:
    return Batch.model_validate(batch_object(RECORD, dataclasses.replace(STATE, **changes), "null"))


@pytest.mark.parametrize("status", [status for status in BatchStatus if status.over])
def test_the_moment_of_the_end_bears_its_name(status: BatchStatus) -> None:
    batch = shown(status=status, ended_ms=3000_500)
    ends = {name: getattr(batch, f"{name}_at") for name in ("completed", "failed", "expired", "cancelled")}
    assert ends == {**dict.fromkeys(ends), status: 3000}


def test_before_the_end_none_of_them_is_there() -> None:
    batch = shown()
    assert (batch.in_progress_at, batch.finalizing_at, batch.completed_at) == (2000, None, None)
    assert (batch.created_at, batch.expires_at) == (1000, 4600)


def test_what_redis_does_not_know_is_validating() -> None:
    batch = Batch.model_validate(batch_object(RECORD, None, None))
    assert (batch.status, batch.usage, batch.model) == ("validating", None, None)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("", None),
        ("[]", None),
        ('[{"code": "x", "message": "m"}]', "m"),
        ('{"message": "m"}', "m"),
        ("plain words", "plain words"),
        ("[1]", "1"),
    ],
)
def test_whatever_the_errors_are_they_can_be_shown(raw: str, message: str | None) -> None:
    errors = shown(errors=raw).errors
    assert (errors.data[0].message if errors and errors.data else None) == message


def test_a_file_is_shown() -> None:
    file = FileObject.model_validate(file_object(StoredFile("file-1", "batch", "a.jsonl", 10, 2, 1000)))
    assert (file.id, file.bytes, file.filename, file.created_at) == ("file-1", 10, "a.jsonl", 1000)


def test_a_page_says_whether_there_is_more() -> None:
    objects = [{"id": name} for name in "abc"]
    page = page_of(objects, 2)
    assert (page["data"], page["first_id"], page["last_id"], page["has_more"]) == (objects[:2], "a", "b", True)
    assert page_of([], 2) == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
