"""`prelay batch submit | status | cancel | download`: one step each of what `run` does as a whole."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

from ..errors import CliError
from ..host import size
from ..report import Report
from .batch import Batch
from .download import check_output, copy, download
from .end import tell_end
from .note import Note
from .patience import Patience
from .run import URL, Target
from .server import RUN, BatchServer
from .source import Source, ready
from .watch import clock, transfer, watch

#: How long one question is tried again, seconds. Who watches a batch waits without end.
PATIENCE_S = 30.0


@contextmanager
def server_of(target: Target, report: Report, patience_s: float = PATIENCE_S) -> Iterator[BatchServer]:
    url = target.url or URL
    server = BatchServer(url, target.api_key, Patience(url, report.warn, patience_s))
    try:
        yield server
    finally:
        server.close()


def submit(source: Source, target: Target, window: str, report: Report) -> int:
    """Upload and create; print the batch's id."""
    with server_of(target, report) as server, ready(source, server.first_model) as lines, transfer(report) as tell:
        file_id = server.upload(lines.file, lines.name, lambda sent: tell("uploading", sent, lines.bytes))
        metadata = {RUN: Note.new("", "", "").run, "input": lines.name[:512]}
        batch = server.create(file_id, lines.endpoint, window, metadata)
    report.step(f"uploaded {lines.name}: {lines.count:,} lines, {size(lines.bytes)}")
    print(batch.id)
    report.say(f"  prelay batch status {batch.id} --watch\n  prelay batch download {batch.id} -o FILE")
    return 0


def status(batch_id: str | None, target: Target, report: Report, *, watched: bool, json: bool, limit: int) -> int:
    """Show one batch or the newest. The exit code of one that is over is that of `run`."""
    with server_of(target, report, float("inf") if watched else PATIENCE_S) as server:
        if batch_id is None:
            batches = server.newest(limit)
            _print_json(batches) if json else _print_table(batches, server.url)
            return 0
        batch = watch(server, batch_id, report) if watched else server.batch(batch_id)
    _print_json([batch]) if json else _print_one(batch)
    return batch.exit_code if batch.is_over else 0


def cancel(batch_id: str, target: Target, report: Report) -> int:
    with server_of(target, report) as server:
        batch = server.cancel(batch_id)
    report.step(f"{batch.id} is {batch.status}")
    if not batch.is_over:
        report.say(f"  what it has so far, once it has ended:  prelay batch download {batch.id} -o FILE")
    return 0


def fetch(batch_id: str, output: str, target: Target, report: Report, *, ordered: bool) -> int:
    """Write the output of a batch that is over to a file (and its errors beside it), or to stdout."""
    if output != "-":
        check_output(Path(output))
    with server_of(target, report, float("inf")) as server:
        batch = server.batch(batch_id)
        if not batch.is_over:
            raise CliError(
                f"{batch.id} is {batch.status} ({batch.ended:,} of {batch.total:,} lines): its files come at its end;"
                f" wait for it with prelay batch status {batch.id} --watch"
            )
        path = None if output == "-" else Path(output)
        errors = None
        if path is None:
            copy(server, batch, sys.stdout.buffer, ordered)
            sys.stdout.buffer.flush()
        else:
            with transfer(report) as tell:
                errors = download(server, batch, path, ordered, tell)
    tell_end(report, batch, path, errors)
    return batch.exit_code


def _print_json(batches: list[Batch]) -> None:
    for batch in batches:
        print(orjson.dumps(batch).decode())


def _print_table(batches: list[Batch], url: str) -> None:
    if not batches:
        print(f"no batches on {url}")
        return
    table = Table("batch", "status", box=None, pad_edge=False, header_style="bold")
    for name in ("done", "failed", "of", "age"):
        table.add_column(name, justify="right")
    table.add_column("input", overflow="ellipsis", no_wrap=True)
    for batch in batches:
        counts = [f"{batch.completed:,}", f"{batch.failed:,}", f"{batch.total:,}"]
        table.add_row(batch.id, batch.status, *counts, _age(batch), (batch.metadata or {}).get("input", ""))
    # Ids are copied from here: never folded, however narrow the terminal.
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    for column in table.columns[:2]:
        column.no_wrap = True
        column.min_width = max(len(str(cell)) for cell in column.cells)
    with suppress(BrokenPipeError):
        console.print(table)


def _age(batch: Batch) -> str:
    seconds = max(0.0, time.time() - batch.created_at) if batch.created_at else 0.0
    return clock(seconds) if seconds < 86_400 else f"{seconds / 86_400:.0f} d"


def _print_one(batch: Batch) -> None:
    took = (batch.ended_at or time.time()) - batch.created_at if batch.created_at else 0
    rows = {
        "batch": batch.id,
        "status": batch.status,
        "endpoint": batch.endpoint,
        "lines": f"{batch.completed:,} done, {batch.failed:,} failed, of {batch.total:,}",
        "tokens": "" if batch.tokens is None else f"{batch.tokens:,}",
        "time": clock(took) if took else "",
        "output": batch.output_file,
        "errors": batch.error_file,
        "input": (batch.metadata or {}).get("input", ""),
        "why": f"{os.linesep}          ".join(batch.errors),
    }
    print("\n".join(f"{name:<9} {value}" for name, value in rows.items() if value))
