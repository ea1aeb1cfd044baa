"""Batches in the terminal: a row each, or one in full. Ids are copied from here: they are never shortened."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable, Sequence

from .batch import Batch
from .watch import clock

_HEADS = ("batch", "status", "done", "failed", "of", "age", "input")
#: Columns of words; the others are of numbers, and end at the right.
_WORDS = (0, 1, 6)
_GAP = "  "


def listed(batches: Sequence[Batch]) -> Iterable[str]:
    """Yield the lines of a table. Where stdout is a terminal, a line that is too long loses its end."""
    rows = [_HEADS, *map(_row, batches)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
    longest = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for row in rows:
        cells = [
            cell.ljust(width) if column in _WORDS else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield _GAP.join(cells).rstrip()[:longest]


def in_full(batch: Batch) -> Iterable[str]:
    """Yield a line for each thing that is known of a batch."""
    took = (batch.ended_at or time.time()) - batch.created_at if batch.created_at else 0
    rows = [
        ("batch", batch.id),
        ("status", batch.status),
        ("endpoint", batch.endpoint),
        ("lines", f"{batch.completed:,} done, {batch.failed:,} failed, of {batch.total:,}"),
        ("tokens", "" if batch.tokens is None else f"{batch.tokens:,}"),
        ("time", clock(took) if took else ""),
        ("output", batch.output_file),
        ("errors", batch.error_file),
        ("input", _input(batch)),
        *(("why", words) for words in batch.errors),
    ]
    for name, value in rows:
        if value:
            yield f"{name:<9} {value}"


def _row(batch: Batch) -> tuple[str, ...]:
    counts = (f"{batch.completed:,}", f"{batch.failed:,}", f"{batch.total:,}")
    return (batch.id, batch.status, *counts, _age(batch), _input(batch))


def _age(batch: Batch) -> str:
    seconds = max(0.0, time.time() - batch.created_at) if batch.created_at else 0.0
    return clock(seconds) if seconds < 86_400 else f"{seconds / 86_400:.0f} d"


def _input(batch: Batch) -> str:
    return (batch.metadata or {}).get("input", "")
