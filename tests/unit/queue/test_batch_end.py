"""The end of a batch survives as JSON."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from prelay_queue.batch_end import end_of, state_of
from prelay_queue.batches import BatchProgress, BatchState, BatchStatus
from prelay_queue.errors import BadMessageError

STATE = BatchState(
    b"{}", BatchStatus.CANCELLED, 3, "host:1:ab", True, "file-1", "", "[]", BatchProgress(5, 3, 2, 40, 50),
    1, 2, 3, 4, 5, 6, 0, -7,
)  # fmt: skip


def test_an_end_is_read_back_from_json() -> None:
    assert state_of(orjson.loads(orjson.dumps(end_of(STATE))), b"{}") == STATE


@pytest.mark.parametrize("end", [{}, {"status": "no"}, {**end_of(STATE), "progress": 1}, {**end_of(STATE), "x": 1}])
def test_what_is_no_end_is_told(end: dict[str, Any]) -> None:
    with pytest.raises(BadMessageError):
        state_of(end, b"{}")
