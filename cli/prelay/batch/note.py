"""The note beside an output: which batch it comes from. OUTPUT.prelay, one JSON object.

Its owner holds a lock on it, so that two runs never write one output. It is written in place, in one write: a
renamed file would be another one, with a lock of its own.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import orjson

from ..errors import BadUsage, CliError


@dataclass(frozen=True, slots=True)
class Note:
    """What is remembered of a run. `run` is its name in the batch's metadata, `batch` empty until there is one.

    `over` is set when the output was written, with the status and counts of that moment.
    """

    run: str
    digest: str
    input: str
    url: str
    batch: str = ""
    over: bool = False
    status: str = ""
    completed: int = 0
    failed: int = 0

    @classmethod
    def new(cls, digest: str, name: str, url: str) -> Note:
        return cls(secrets.token_hex(12), digest, name, url)

    @classmethod
    def decode(cls, raw: bytes) -> Note | None:
        """Return None for what is no note."""
        try:
            found: dict[str, Any] = orjson.loads(raw)
            note = cls(**{field.name: found[field.name] for field in fields(cls) if field.name in found})
        except (ValueError, TypeError):
            return None
        kinds = (str, str, str, str, str, bool, str, int, int)
        values = [getattr(note, field.name) for field in fields(cls)]
        return note if all(map(isinstance, values, kinds)) else None

    def encode(self) -> bytes:
        return orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


class Notebook:
    """The note of an output, held by this process until `close`."""

    def __init__(self, output: Path) -> None:
        """Open it and take its lock. Raise BadUsage when another run has it, or it cannot be written."""
        self.path = path_of(output)
        self._is_new = not self.path.exists()
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise BadUsage(f"-o {output}: cannot write {self.path}: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.note = self._read()
        except BlockingIOError:
            os.close(self._file)
            raise BadUsage(f"another prelay batch run is writing {output}: wait for it, or use another -o") from None
        except BaseException:
            os.close(self._file)
            raise

    def _read(self) -> Note | None:
        raw = os.pread(self._file, 1 << 20, 0)
        if not raw.strip():
            return None
        note = Note.decode(raw)
        if note is None:
            raise BadUsage(f"{self.path} is no note of a run: move it away, or use another -o")
        return note

    def write(self, note: Note, **changes: Any) -> Note:
        """Write it, durable."""
        self.note = note = replace(note, **changes)
        raw = note.encode()
        try:
            os.pwrite(self._file, raw, 0)
            os.ftruncate(self._file, len(raw))
            os.fsync(self._file)
        except OSError as error:
            raise CliError(f"cannot write {self.path}: {error.strerror}") from None
        return note

    def close(self) -> None:
        """Give the lock back. A file that holds nothing is removed again."""
        if self._is_new and self.note is None:
            self.path.unlink(missing_ok=True)
        os.close(self._file)


def path_of(output: Path) -> Path:
    return output.with_name(output.name + ".prelay")
