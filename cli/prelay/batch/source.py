"""The input of a batch: a file of lines, ready to be sent."""

from __future__ import annotations

import codecs
import hashlib
import io
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

from ..errors import BadUsage
from .lines import ENDPOINTS, Shape, endpoint_of, from_csv, from_text

STDIN = "-"
#: Bytes that are read at a time.
_CHUNK = 1 << 20


class Kind(StrEnum):
    JSONL = "jsonl"
    TEXT = "text"
    CSV = "csv"


@dataclass(frozen=True, slots=True)
class Source:
    """What the command line says of the input. `shape` counts only where prompts become lines."""

    path: str
    kind: Kind
    shape: Shape
    prompt_column: str = "prompt"
    endpoint: str | None = None

    @property
    def name(self) -> str:
        return "stdin" if self.path == STDIN else Path(self.path).name


@dataclass(frozen=True, slots=True)
class Ready:
    """A file of lines, at any place in it. `digest` is of its bytes, `count` how many lines are not blank."""

    file: BinaryIO
    name: str
    digest: str
    bytes: int
    count: int
    endpoint: str


@contextmanager
def ready(source: Source, first_model: Callable[[], str]) -> Iterator[Ready]:
    """Read it once: what is no file of lines yet becomes one, on disk. Raise BadUsage with one line.

    `first_model` is asked where prompts become lines and no model was named.
    """
    with ExitStack() as stack:
        raw = stack.enter_context(_opened(source))
        if source.kind is Kind.JSONL and raw.seekable():
            file = raw
        else:
            file = stack.enter_context(tempfile.TemporaryFile(prefix="prelay-batch-"))
            endpoint = _convert(source, raw, file, first_model)
        yield _measured(source, file, source.endpoint if source.kind is Kind.JSONL else endpoint)


def _convert(source: Source, raw: BinaryIO, into: BinaryIO, first_model: Callable[[], str]) -> str:
    """Write lines, and return where they go."""
    if source.kind is Kind.JSONL:
        while chunk := raw.read(_CHUNK):
            into.write(chunk)
        return ""
    shape = source.shape if source.shape.model else replace(source.shape, model=first_model())
    # newline="" keeps line breaks within a quoted field; a byte order mark is no part of the first prompt.
    text = io.TextIOWrapper(raw, encoding="utf-8-sig", newline="" if source.kind is Kind.CSV else None)
    try:
        prompts = from_text(text) if source.kind is Kind.TEXT else from_csv(text, source.prompt_column, source.name)
        for custom_id, prompt in prompts:
            into.write(shape.line(custom_id, prompt))
    except UnicodeDecodeError as error:
        raise BadUsage(f"{source.name} is not UTF-8 ({error.reason} near byte {error.start})") from None
    finally:
        text.detach()
    return shape.endpoint


def _measured(source: Source, file: BinaryIO, endpoint: str | None) -> Ready:
    """Take digest, size, number of lines, and from the first line where they go, where that is not known."""
    digest, size, count = hashlib.blake2b(digest_size=16), 0, 0
    first = b""
    file.seek(0)
    for line in file:
        digest.update(line)
        size += len(line)
        if line.strip():
            count += 1
            first = first or line.removeprefix(codecs.BOM_UTF8)
    if not count:
        raise BadUsage(f"{source.name} has no line: nothing to run")
    endpoint = endpoint or endpoint_of(first)
    if endpoint is None:
        raise BadUsage(
            f'{source.name}: the first line names no "url" of {" or ".join(ENDPOINTS)}; give --endpoint, or --text for'
            " a file of prompts"
        )
    return Ready(file, source.name, digest.hexdigest(), size, count, endpoint)


@contextmanager
def _opened(source: Source) -> Iterator[BinaryIO]:
    if source.path == STDIN:
        if sys.stdin.isatty():
            print("reading lines from the terminal; Ctrl-D ends them", file=sys.stderr)
        yield sys.stdin.buffer
        return
    try:
        file = Path(source.path).open("rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise BadUsage(f"cannot read {source.path}: {error.strerror}") from None
    with file:
        yield file
