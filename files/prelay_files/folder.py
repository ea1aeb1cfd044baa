"""What stands on disk of one batch."""

from __future__ import annotations

import contextlib
import logging
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from . import durable
from .errors import Damaged, FileMissing
from .ids import is_batch_id
from .record import BatchRecord

log = logging.getLogger("prelay.files")

#: What is half made or half removed for so long was left by a process that died, seconds.
STALE_S = 60.0


class BatchFolder:
    """`root`/batches/`batch_id`: the record, the end once there is one, and a folder for each run (see Ledger)."""

    def __init__(self, root: Path, batch_id: str) -> None:
        """Raise FileMissing for what is no id."""
        if not is_batch_id(batch_id):
            raise _missing(batch_id)
        self.id = batch_id
        self.path = _all(root) / batch_id

    def __repr__(self) -> str:
        return f"BatchFolder({self.path})"

    @staticmethod
    def create(root: Path, record: BatchRecord) -> BatchFolder:
        """Write the record of a new batch. The batch is there whole or not at all."""
        folder = BatchFolder(root, record.id)
        with durable.translated():
            durable.make_folder(_all(root))
            beside = _all(root) / f".{record.id}.{secrets.token_hex(4)}"
            beside.mkdir(mode=0o700)
            try:
                durable.replace(beside / "record.json", record.encode())
                beside.rename(folder.path)
            except BaseException:
                shutil.rmtree(beside, ignore_errors=True)
                raise
            durable.sync_folder(folder.path.parent)
        return folder

    @staticmethod
    def list(root: Path, *, after: str = "", limit: int) -> Sequence[BatchRecord]:
        """Up to `limit` batches, the newest first, that come behind the id `after`."""
        names = [name for name in reversed(_ids(root)) if not after or name < after]
        return [*islice(_records(root, names), limit)]

    @staticmethod
    def unfinished(root: Path) -> Sequence[BatchFolder]:
        """All batches that have no end yet, the oldest first."""
        folders = (BatchFolder(root, batch_id) for batch_id in _ids(root))
        return [folder for folder in folders if not folder.end_path.exists()]

    @staticmethod
    def reader_of(root: Path, file_id: str) -> str | None:
        """The oldest batch that is not over and has this file as its input."""
        records = _records(root, [folder.id for folder in BatchFolder.unfinished(root)])
        return next((record.id for record in records if record.input_file_id == file_id), None)

    @staticmethod
    def sweep(root: Path) -> Sequence[str]:
        """Remove what processes left half made or half removed that died; return the names."""
        gone = []
        folders = list(_all(root).iterdir()) if _all(root).is_dir() else []
        for path in folders:
            if path.name.startswith(".") and _age_s(path) > STALE_S:
                left = [path]
            elif is_batch_id(path.name) and (folder := BatchFolder(root, path.name)).end_path.exists():
                left = list(folder.runs())
            else:
                continue
            for each in left:
                shutil.rmtree(each, ignore_errors=True)
                gone.append(str(each.relative_to(_all(root))))
        return gone

    @property
    def end_path(self) -> Path:
        return self.path / "end.json"

    def record(self) -> BatchRecord:
        """Raise FileMissing."""
        try:
            return BatchRecord.decode((self.path / "record.json").read_bytes())
        except FileNotFoundError:
            raise _missing(self.id) from None

    def asked_at(self) -> float:
        """When the record was written, seconds since 1970 by the disk's clock; 0.0 when it is not there."""
        try:
            return (self.path / "record.json").stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def end(self) -> dict[str, Any] | None:
        """How it ended; None while it has not."""
        try:
            found = orjson.loads(self.end_path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise Damaged(f"{self.end_path} is no JSON: {error}") from None
        if not isinstance(found, dict):
            raise Damaged(f"{self.end_path} is no object")
        return found

    def ask_cancel(self) -> None:
        """Note that it is to be cancelled, for when Redis forgets it. Raise FileMissing."""
        with durable.translated():
            try:
                durable.write_once(self.path / "cancel", b"")
            except FileNotFoundError:
                raise _missing(self.id) from None

    def cancel_asked(self) -> bool:
        return (self.path / "cancel").exists()

    def write_end(self, end: dict[str, Any]) -> dict[str, Any]:
        """Note how it ended and return what stands: the first one wins. The runs' own folders go."""
        with durable.translated():
            try:
                won = durable.write_once(self.end_path, orjson.dumps(end))
            except FileNotFoundError:
                raise _missing(self.id) from None
        stands = end if won else self.end()
        assert stands is not None
        for run in self.runs():
            shutil.rmtree(run, ignore_errors=True)
        return stands

    def remove(self) -> None:
        """Forget the batch, which nobody was told of yet."""
        with durable.translated():
            beside = self.path.with_name(f".{self.id}.{secrets.token_hex(4)}")
            with contextlib.suppress(FileNotFoundError):
                self.path.rename(beside)
                durable.sync_folder(beside.parent)
            shutil.rmtree(beside, ignore_errors=True)

    def runs(self) -> Sequence[Path]:
        """The folders of its runs in the order of their epochs."""
        if not self.path.is_dir():
            return []
        found = (run for run in self.path.iterdir() if run.name.replace(".", "", 1).isdecimal())
        return sorted(found, key=lambda run: run_number(run.name))

    def epochs(self) -> Sequence[int]:
        """The epochs that have run, in order."""
        return sorted({run_number(run.name)[0] for run in self.runs()})


def run_number(name: str) -> tuple[int, int]:
    """Epoch and place among the runs of that epoch, of a run's name."""
    epoch, _, again = name.partition(".")
    return int(epoch), int(again or 0)


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:  # whoever it was is quicker
        return 0.0


def _all(root: Path) -> Path:
    return root / "batches"


def _ids(root: Path) -> list[str]:
    if not _all(root).is_dir():
        return []
    return sorted(filter(is_batch_id, (path.name for path in _all(root).iterdir())))


def _records(root: Path, names: Sequence[str]) -> Iterator[BatchRecord]:
    """What cannot be read hides no other."""
    for name in names:
        try:
            yield BatchFolder(root, name).record()
        except FileMissing:  # removed meanwhile
            continue
        except Damaged as error:
            log.error("batch %s cannot be read: %s", name, error)


def _missing(batch_id: str) -> FileMissing:
    return FileMissing(f"there is no batch {batch_id[:100]!r}")
