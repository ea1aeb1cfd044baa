"""The files of a batch that is over, each written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ..errors import BadUsage, CliError
from .batch import Batch
from .order import in_order
from .server import BatchServer

#: (what is fetched, bytes that came, bytes of the whole or 0)
Tell = Callable[[str, int, int], None]


def errors_path(output: Path) -> Path:
    """Where lines that failed go: out.errors.jsonl beside out.jsonl."""
    return output.with_name(f"{output.stem}.errors{output.suffix or '.jsonl'}")


def check_output(output: Path) -> None:
    """Raise BadUsage where an output cannot be written: before hours of work, not after."""
    if output.is_dir():
        raise BadUsage(f"-o {output} is a folder: name a file")
    folder = output.parent
    if not folder.is_dir():
        raise BadUsage(f"-o {output}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise BadUsage(f"-o {output}: the folder {folder} cannot be written")


def download(server: BatchServer, batch: Batch, output: Path, ordered: bool, tell: Tell) -> Path | None:
    """Write output and errors. Return where the errors are, None where there are none.

    Where no line has an answer, the output is an empty file: what reads it next finds it.
    """
    errors = errors_path(output) if batch.error_file else None
    if errors is not None:  # first: who sees the output sees all
        _fetch(server, batch.error_file, errors, ordered, tell)
    if batch.output_file:
        _fetch(server, batch.output_file, output, ordered, tell)
    else:
        with replacing(output):
            pass
    return errors


def copy(server: BatchServer, batch: Batch, into: BinaryIO, ordered: bool) -> None:
    """Write the output to a stream that cannot be rewound, once all of it is here."""
    if not batch.output_file:
        return
    with tempfile.TemporaryFile(prefix="prelay-batch-") as whole:
        server.content(batch.output_file, whole, lambda _bytes: None)
        if ordered:
            in_order(whole, into)
            return
        whole.seek(0)
        while chunk := whole.read(1 << 20):
            into.write(chunk)


def _fetch(server: BatchServer, file_id: str, output: Path, ordered: bool, tell: Tell) -> None:
    size = server.size(file_id)
    with replacing(output) as file:
        if not ordered:
            server.content(file_id, file, lambda got: tell(output.name, got, size))
            return
        with tempfile.TemporaryFile(prefix=".prelay-", dir=output.parent) as unordered:
            server.content(file_id, unordered, lambda got: tell(output.name, got, size))
            in_order(unordered, file)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when all went well, durable, and else is gone. Raise CliError."""
    try:
        number, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        try:
            with os.fdopen(number, "w+b") as file:
                yield file
                file.flush()
                os.fchmod(number, 0o666 & ~_umask())
                os.fsync(number)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}") from None


def _umask() -> int:
    """There is no way to ask for it but to set it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
