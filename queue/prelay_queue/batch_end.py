"""The end of a batch in the form in which it is kept when Redis has forgotten it (`BatchFolder.write_end`)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .batches import BatchProgress, BatchState, BatchStatus
from .errors import BadMessageError


def end_of(state: BatchState) -> dict[str, Any]:
    """The state without the record, which is kept beside it; JSON takes it as it is. `state` is over."""
    assert state.status.over, state.status
    fields = asdict(state)
    del fields["record"]
    return fields


def state_of(end: dict[str, Any], record: bytes) -> BatchState:
    """The state that `end_of` was given. Raise BadMessageError when it is none."""
    try:
        fields = {**end, "status": BatchStatus(end["status"]), "progress": BatchProgress(**end["progress"])}
        return BatchState(record=record, **fields)
    except (ValueError, KeyError, TypeError) as error:
        raise BadMessageError(repr(end).encode(), str(error)) from None
