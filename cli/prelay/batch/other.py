"""`prelay batch submit | status | cancel | download`: one step each of what `run` does as a whole."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson

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
from .table import in_full, listed
from .watch import transfer, watch

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
    at = _at(target)
    report.say(f"  prelay batch status {batch.id} --watch{at}\n  prelay batch download {batch.id} -o FILE{at}")
    return 0


def status(batch_id: str | None, target: Target, report: Report, *, watched: bool, json: bool, limit: int) -> int:
    """Show one batch or the newest. The exit code of one that is over is that of `run`."""
    with server_of(target, report, float("inf") if watched else PATIENCE_S) as server:
        if batch_id is None:
            batches = server.newest(limit)
            if json:
                _print_json(batches)
            else:
                print("\n".join(listed(batches)) if batches else f"no batches on {server.url}")
            return 0
        batch = watch(server, batch_id, report) if watched else server.batch(batch_id)
    if json:
        _print_json([batch])
    else:
        print("\n".join(in_full(batch)))
    return batch.exit_code if batch.is_over else 0


def cancel(batch_id: str, target: Target, report: Report) -> int:
    with server_of(target, report) as server:
        batch = server.cancel(batch_id)
    report.step(f"{batch.id} is {batch.status}")
    if not batch.is_over:
        report.say(f"  what it has so far, once it has ended:  prelay batch download {batch.id} -o FILE{_at(target)}")
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
                f" wait for it with prelay batch status {batch.id} --watch{_at(target)}"
            )
        path = None if output == "-" else Path(output)
        errors = None
        if path is None:
            _to_stdout(server, batch, ordered)
        else:
            with transfer(report) as tell:
                errors = download(server, batch, path, ordered, tell)
    tell_end(report, batch, path, errors)
    return batch.exit_code


def _to_stdout(server: BatchServer, batch: Batch, ordered: bool) -> None:
    """Who reads it may have had enough before its end."""
    try:
        copy(server, batch, sys.stdout.buffer, ordered)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains at its end


def _at(target: Target) -> str:
    """The words that name the server, where they are needed."""
    return f" --url {shlex.quote(target.url)}" if target.url else ""


def _print_json(batches: list[Batch]) -> None:
    for batch in batches:
        print(orjson.dumps(batch).decode())
