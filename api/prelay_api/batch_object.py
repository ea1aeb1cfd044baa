"""A batch as OpenAI's API shows it."""

from __future__ import annotations

from typing import Any

import orjson

from prelay_files.record import BatchRecord
from prelay_files.store import StoredFile
from prelay_queue.batches import BatchState, BatchStatus

from .batch_order import window_name


def batch_object(record: BatchRecord, state: BatchState | None, model: str | None) -> dict[str, Any]:
    """`state` as Redis has it, or as it was at the end; None: Redis does not know the batch (yet, or any more)."""
    counts = state.progress if state else None
    return {
        "id": record.id,
        "object": "batch",
        "endpoint": record.endpoint,
        "model": model,
        "errors": _errors(state.errors) if state else None,
        "input_file_id": record.input_file_id,
        "completion_window": window_name(record.completion_window_s),
        "status": state.status if state else BatchStatus.VALIDATING,
        "output_file_id": (state and state.output_file) or None,
        "error_file_id": (state and state.error_file) or None,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        **_moments(state),
        "request_counts": {
            "total": counts.total if counts else 0,
            "completed": counts.completed if counts else 0,
            "failed": counts.failed if counts else 0,
        },
        "usage": _usage(state),
        "metadata": record.metadata or None,
    }


def file_object(file: StoredFile) -> dict[str, Any]:
    """A file as OpenAI's API shows it, and how many lines it has."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "lines": file.lines,
        "created_at": file.created_at,
        "expires_at": None,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def page_of(objects: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """One page of a list, of which one more than `limit` was looked up."""
    shown = objects[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(objects) > limit,
    }


def _moments(state: BatchState | None) -> dict[str, int | None]:
    """Seconds since 1970 by Redis's clock; null for what has not come, or never will."""
    ended = {f"{status}_at": None for status in BatchStatus if status.over}
    if state is None:
        return {"in_progress_at": None, "finalizing_at": None, "cancelling_at": None, **ended}
    return {
        "in_progress_at": _seconds(state.started_ms),
        "finalizing_at": _seconds(state.finalizing_ms),
        "cancelling_at": _seconds(state.cancelling_ms),
        **ended,
        **({f"{state.status}_at": _seconds(state.ended_ms)} if state.status.over else {}),
    }


def _seconds(moment_ms: int) -> int | None:
    return moment_ms // 1000 if moment_ms else None


def _usage(state: BatchState | None) -> dict[str, Any] | None:
    """Tokens of the lines that were served so far. What of them was cached is not counted for a batch."""
    if state is None or not state.progress.completed:
        return None
    asked, answered = state.progress.prompt_tokens, state.progress.completion_tokens
    return {
        "input_tokens": asked,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": answered,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": asked + answered,
    }


def _errors(raw: str) -> dict[str, Any] | None:
    """Why a batch failed as a whole: a JSON list of OpenAI's error objects. Other words are shown as they are."""
    if not raw:
        return None
    try:
        found = orjson.loads(raw)
    except orjson.JSONDecodeError:
        found = [{"code": "failed", "message": raw}]
    listed = found if isinstance(found, list) else [found]
    blank = {"code": None, "line": None, "message": None, "param": None}
    data = [blank | (each if isinstance(each, dict) else {"message": str(each)}) for each in listed]
    return {"object": "list", "data": data} if data else None
