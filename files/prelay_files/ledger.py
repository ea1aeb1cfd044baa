"""One runner's durable progress through a batch.

Each run has a folder of its own, so two that believe to be the runner never write to one file. What counts is a
chain: the beginnings of the parts of the runs so far. A run that takes over reads the newest checkpoint before it,
looks what that run wrote behind it, and fixes all that as its own first checkpoint, before anything else. What a run
that was only frozen writes after that lies behind the lengths in the chain, and is never read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import orjson

from . import durable
from .bitmap import Bitmap
from .checkpoint import ERRORS, NAME, PARTS, RESULTS, Checkpoint, Link
from .errors import Damaged, FileMissing, StorageFailed
from .folder import BatchFolder, run_number
from .ids import new_file_id
from .store import FileStore
from .tail import read_tail

log = logging.getLogger("prelay.files")

#: Bytes copied at a time into a result file.
_PIECE = 1024 * 1024
#: Where a run notes the ids of the files that it makes of its results.
_NAMES = "files.json"


class Ledger:
    """Not for two threads. Nothing is on disk for good before `checkpoint`."""

    def __init__(self, folder: BatchFolder, run: Path, before: Checkpoint) -> None:
        """Use `take_over`."""
        self._folder, self._run = folder, run
        self._before, self._state = before.chain, before
        self._files = {part: (run / part).open("wb") for part in PARTS}
        self._sizes = dict.fromkeys(PARTS, 0)
        self._broken = False

    @classmethod
    def take_over(cls, folder: BatchFolder, epoch: int) -> Ledger:
        """Go on where the runs before `epoch` have come. Raise StorageFailed; then nothing is left of this run.

        May be called again for the same epoch, also by another process (a Redis that lost its latest writes gives an
        epoch out twice): each call makes a run of its own, which goes on from the one before.
        """
        with durable.translated():
            run = _make_run(folder, epoch)
            with contextlib.ExitStack() as undo:  # tried again and again while the disk is full, nothing piles up
                undo.callback(shutil.rmtree, run, ignore_errors=True)
                ledger = cls(folder, run, _newest(folder, run_number(run.name)))
                undo.callback(ledger.close)
                ledger.checkpoint()
                undo.pop_all()
        return ledger

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def done(self) -> Bitmap:
        """The lines of the input that have been answered, well or not."""
        return self._state.done

    @property
    def completed(self) -> int:
        return self._state.totals.completed

    @property
    def failed(self) -> int:
        return self._state.totals.failed

    @property
    def prompt_tokens(self) -> int:
        return self._state.totals.prompt_tokens

    @property
    def completion_tokens(self) -> int:
        return self._state.totals.completion_tokens

    def append(self, line: int, *, ok: bool, raw: bytes, prompt_tokens: int = 0, completion_tokens: int = 0) -> bool:
        """Note the answer to a line of the input: `raw` is a line of JSON, and its id ends in _LINE.

        False, and nothing is noted, when the line has been answered before. Not for good before `checkpoint`.
        """
        raw = raw if raw.endswith(b"\n") else raw + b"\n"
        if raw.count(b"\n") > 1:
            raise ValueError(f"raw must be one line, but has a line break: {raw[:100]!r}")
        if line in self.done:
            return False
        part = RESULTS if ok else ERRORS
        with self._trusted():
            self._files[part].write(raw)
        self._sizes[part] += len(raw)
        _count(self._state, line, part, prompt_tokens, completion_tokens)
        return True

    def checkpoint(self) -> None:
        """Make all that was appended last.

        Raise StorageFailed: then the checkpoint before stands, and this ledger is of no use any more.
        """
        with self._trusted():
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
            mine = Link(self._run.name, self._sizes[RESULTS], self._sizes[ERRORS])
            self._state.chain = (*self._before, mine) if mine.results or mine.errors else self._before
            durable.replace(self._run / NAME, self._state.encode())

    def assemble(self, store: FileStore) -> tuple[str | None, str | None]:
        """Make files of the results and of the errors: their ids, None for an empty one.

        May be called again. Files that an earlier run made and did not live to announce are deleted.
        """
        self.checkpoint()
        with durable.translated():
            for run in self._folder.runs():
                if run_number(run.name) < run_number(self._run.name):
                    _forget_files(store, run)
            names = _names(self._run)
        made = {part: self._assembled(store, part, names[part]) for part in PARTS}
        return made[RESULTS], made[ERRORS]

    def close(self) -> None:
        """Let go of the files. What was not checkpointed may be lost."""
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()

    @contextlib.contextmanager
    def _trusted(self) -> Iterator[None]:
        """After an error of the disk nobody knows what a part holds, nor what a second fsync would tell."""
        if self._broken:
            raise StorageFailed(f"{self._run} could not be written to before")
        self._broken = True
        with durable.translated():
            yield
        self._broken = False

    def _assembled(self, store: FileStore, part: str, file_id: str) -> str | None:
        if not any(link.size(part) for link in self._state.chain):
            return None
        purpose, word = "batch_output", "output" if part == RESULTS else "error"
        with store.create(purpose, f"{self._folder.id}_{word}.jsonl", file_id=file_id) as writing:
            for piece in self._pieces(part):
                writing.write(piece)
            return writing.commit().id

    def _pieces(self, part: str) -> Iterator[bytes]:
        for link in self._state.chain:
            if size := link.size(part):
                with (self._folder.path / link.run / part).open("rb") as file:
                    yield from _first(file, size)


def _make_run(folder: BatchFolder, epoch: int) -> Path:
    """A folder that nobody else has."""
    again = 0
    while True:
        run = folder.path / (f"{epoch}.{again}" if again else str(epoch))
        try:
            run.mkdir(mode=0o700)
        except FileExistsError:
            again += 1
        else:
            durable.sync_folder(folder.path)
            return run


def _newest(folder: BatchFolder, before: tuple[int, int]) -> Checkpoint:
    """The newest checkpoint of a run before that one, and what that run wrote behind it.

    What is damaged is passed over: lines are then computed again, but none is lost or doubled.
    """
    for run in reversed(folder.runs()):
        if run_number(run.name) >= before or not (run / NAME).exists():
            continue
        try:
            found = Checkpoint.decode((run / NAME).read_bytes())
            found.check_parts(folder.path)
        except Damaged as error:
            log.error("batch %s: run %s is passed over: %s", folder.id, run.name, error)
            continue
        return _with_tail(found, run)
    return Checkpoint()


def _with_tail(found: Checkpoint, run: Path) -> Checkpoint:
    """Add what the run wrote behind its checkpoint, whole lines only, each once; and make that last."""
    mine = next((link for link in found.chain if link.run == run.name), Link(run.name, 0, 0))
    ends = {}
    for part in PARTS:
        ends[part] = mine.size(part)
        for written in read_tail(run / part, mine.size(part)):
            if written.line in found.done:  # nobody writes that: what follows is not to be trusted
                break
            _count(found, written.line, part, written.prompt_tokens, written.completion_tokens)
            ends[part] = written.end
        if ends[part] > mine.size(part):
            durable.sync_file(run / part)
    rest = tuple(link for link in found.chain if link.run != run.name)
    grown = Link(run.name, ends[RESULTS], ends[ERRORS])
    return Checkpoint((*rest, grown) if grown.results or grown.errors else rest, found.done, found.totals)


def _count(state: Checkpoint, line: int, part: str, prompt_tokens: int, completion_tokens: int) -> None:
    state.done.add(line)
    totals = state.totals
    totals.completed += part == RESULTS
    totals.failed += part == ERRORS
    totals.prompt_tokens += prompt_tokens
    totals.completion_tokens += completion_tokens


def _names(run: Path) -> dict[str, str]:
    """The ids of the files that this run makes: chosen once."""
    path = run / _NAMES
    if not path.exists():
        durable.replace(path, orjson.dumps({part: new_file_id() for part in PARTS}))
    names: dict[str, str] = orjson.loads(path.read_bytes())
    return names


def _forget_files(store: FileStore, run: Path) -> None:
    if (run / _NAMES).exists():
        for file_id in _names(run).values():
            try:
                store.delete(file_id)
            except FileMissing:
                continue


def _first(file: BinaryIO, size: int) -> Iterator[bytes]:
    """The first `size` bytes of a file, piece by piece."""
    while size > 0:
        piece = file.read(min(size, _PIECE))
        if not piece:
            raise Damaged(f"{file.name} is shorter than it was by {size} bytes")
        size -= len(piece)
        yield piece
