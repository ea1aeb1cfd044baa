"""What is said when a batch is over."""

from __future__ import annotations

from pathlib import Path

from ..report import Report
from .batch import Batch

#: Reasons of a failed batch that are shown.
SHOWN = 10


def tell_end(
    report: Report, batch: Batch, output: Path | None, errors: Path | None, took_s: float | None = None
) -> None:
    """Say how it ended and where its answers and errors are."""
    if batch.status != "completed":
        report.warn(f"{batch.id} is {batch.status}")
        for words in batch.errors[:SHOWN]:
            report.say(f"  {words}")
        if (more := len(batch.errors) - SHOWN) > 0:
            report.say(f"  and {more} more")
    if output is not None:
        tokens = f", {batch.tokens:,} tokens" if batch.tokens is not None else ""
        took = f", in {took_s:.1f} s" if took_s is not None else ""
        report.step(f"{output}: {batch.completed:,} answers{tokens}{took}")
    if errors is not None:
        report.warn(f"{errors}: {batch.failed:,} lines without an answer, each with its reason")
