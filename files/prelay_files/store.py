"""Files by id: uploaded ones, and the results of batches."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import orjson

from . import durable
from .errors import Damaged, FileMissing, FileTooLarge, StorageFailed
from .ids import is_file_id, new_file_id

#: What nobody has written to for so long, and nobody holds, was left by a process that died, seconds.
STALE_S = 60.0

_PART = ".part-"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that is here. `lines` counts blank ones too; `created_at` is in seconds since 1970."""

    id: str
    purpose: str
    filename: str
    bytes: int
    lines: int
    created_at: int


@dataclass(frozen=True, slots=True)
class FileLimits:
    """How large a file may be that comes from outside."""

    bytes: int
    lines: int
    line_bytes: int


class FileStore:
    """The files in `root`/files, each a content and a description. A file exists once its description does.

    Any number of processes may use one folder. All methods wait for the disk.
    """

    def __init__(self, root: Path) -> None:
        self._folder = root / "files"
        with durable.translated():
            durable.make_folder(self._folder)

    def create(self, purpose: str, filename: str, limits: FileLimits | None = None, file_id: str = "") -> Writing:
        """Begin a file. Nobody sees it before `commit`, and nothing is left of it without one."""
        return Writing(self._folder, file_id or new_file_id(), purpose, filename, limits)

    def get(self, file_id: str) -> StoredFile:
        """Raise FileMissing, also for what is no id at all."""
        try:
            return _read(self._description(file_id).read_bytes())
        except FileNotFoundError:
            raise _missing(file_id) from None

    def open(self, file_id: str) -> BinaryIO:
        """The content, to read. It can be read to its end also when the file is deleted meanwhile."""
        self.get(file_id)
        try:
            return (self._folder / file_id).open("rb")
        except FileNotFoundError:
            raise _missing(file_id) from None

    def delete(self, file_id: str) -> None:
        """Raise FileMissing when it is not there."""
        description = self._description(file_id)
        with durable.translated():
            try:
                description.unlink()
            except FileNotFoundError:
                raise _missing(file_id) from None
            durable.sync_folder(self._folder)
            (self._folder / file_id).unlink(missing_ok=True)

    def list(
        self, *, after: str = "", limit: int, purpose: str = "", newest_first: bool = True
    ) -> Sequence[StoredFile]:
        """Up to `limit` files that come behind the id `after`, of one purpose or of any."""
        names = sorted(filter(is_file_id, (each.stem for each in self._folder.glob("file-*.json"))))
        if newest_first:
            names.reverse()
        if after:
            names = [name for name in names if (name < after if newest_first else name > after)]
        wanted = (file for file in self._described(names) if purpose in ("", file.purpose))
        return [*islice(wanted, limit)]

    def sweep(self) -> Sequence[str]:
        """Remove what processes that died were writing; return the names."""
        gone = []
        for path in self._folder.iterdir():
            unfinished = path.name.startswith(".") or (
                is_file_id(path.name) and not path.with_name(f"{path.name}.json").exists()
            )
            if unfinished and _is_abandoned(path):
                path.unlink(missing_ok=True)
                gone.append(path.name)
        return gone

    def _described(self, names: Sequence[str]) -> Iterator[StoredFile]:
        for name in names:
            try:
                yield self.get(name)
            except FileMissing:  # deleted meanwhile
                continue

    def _description(self, file_id: str) -> Path:
        if not is_file_id(file_id):
            raise _missing(file_id)
        return self._folder / f"{file_id}.json"


def check_root(root: Path) -> None:
    """Raise StorageFailed, with the name of the setting, where no file could be kept. For the start."""
    try:
        with FileStore(root).create("check", "check"):
            pass
    except StorageFailed as error:
        raise StorageFailed(f"files_dir {root} cannot be used: {error}") from None


class Writing:
    """A file that is being written. As a context manager it is aborted unless it was committed.

    The file is locked as long as this lives, so that a sweep can tell it from what a dead process left.
    """

    def __init__(self, folder: Path, file_id: str, purpose: str, filename: str, limits: FileLimits | None) -> None:
        self.id = file_id
        self.bytes = 0
        self._purpose, self._filename, self._limits = purpose, filename, limits
        self._folder = folder
        self._ended_lines = self._open_line = 0
        self._part = folder / f"{_PART}{file_id}"
        with durable.translated():
            handle = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            self._file = open(handle, "wb")  # noqa: SIM115, PTH123 - closed by commit or abort
            fcntl.flock(handle, fcntl.LOCK_EX)

    def __enter__(self) -> Writing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    @property
    def lines(self) -> int:
        """Lines so far, one without its end included."""
        return self._ended_lines + bool(self._open_line)

    def write(self, data: bytes) -> None:
        """Raise FileTooLarge, before it is written, for what is beyond a limit; StorageFailed."""
        before = self._ended_lines
        self.bytes += len(data)
        self._ended_lines += data.count(b"\n")
        if self._limits is not None and data:
            self._check(data, before, self._limits)
        last = data.rfind(b"\n")
        self._open_line = len(data) - last - 1 if last >= 0 else self._open_line + len(data)
        with durable.translated():
            self._file.write(data)

    def commit(self) -> StoredFile:
        """Make it a file, for good."""
        stored = StoredFile(self.id, self._purpose, self._filename, self.bytes, self.lines, int(time.time()))
        content = self._folder / self.id
        with durable.translated():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._part.replace(content)
            durable.replace(self._folder / f"{self.id}.json", orjson.dumps(asdict(stored)))
            self._file.close()
        return stored

    def abort(self) -> None:
        """Leave nothing. After `commit`, or a second time, nothing happens."""
        if self._file.closed:
            return
        for path in (self._folder / f"{self.id}.json", self._part, self._folder / self.id):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it writes what is in its buffer, and the disk may be full
            self._file.close()

    def _check(self, data: bytes, lines_before: int, limits: FileLimits) -> None:
        if self.bytes > limits.bytes:
            raise FileTooLarge("bytes", self.bytes, limits.bytes)
        lines = self._ended_lines + (not data.endswith(b"\n"))
        if lines > limits.lines:
            raise FileTooLarge("lines", lines, limits.lines)
        if self._open_line + len(data) <= limits.line_bytes:  # no line in it can be longer
            return
        size = self._open_line
        for number, line in enumerate(data.split(b"\n"), lines_before + 1):
            if size + len(line) > limits.line_bytes:
                raise FileTooLarge("line_bytes", number, limits.line_bytes)
            size = 0


def _read(description: bytes) -> StoredFile:
    try:
        return StoredFile(**orjson.loads(description))
    except (ValueError, TypeError) as error:
        raise Damaged(f"not the description of a file ({error}): {description[:100]!r}") from None


def _is_abandoned(path: Path) -> bool:
    """Whether the process that wrote it is gone."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            return time.time() - os.fstat(file.fileno()).st_mtime > STALE_S
    except OSError:  # held, or gone by itself
        return False


def _missing(file_id: str) -> FileMissing:
    return FileMissing(f"there is no file {file_id[:100]!r}")
