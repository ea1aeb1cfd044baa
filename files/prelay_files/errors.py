"""Errors of files on disk.

FilesError
├── FileMissing       no file or batch of this id
├── FileTooLarge      a file is beyond a limit, which the message names together with the value
├── Damaged           what is on disk is not what was written
├── FolderShared      somebody with another queue uses the folder
└── StorageFailed     the disk is full or refuses
"""

from __future__ import annotations

from pathlib import Path


class FilesError(Exception):
    """The disk could not do what was asked."""


class FileMissing(FilesError):  # noqa: N818 - reads as the fact it states
    """There is no file or batch of this id."""


class FileTooLarge(FilesError):  # noqa: N818
    """A file is beyond a limit. `limit` is that of bytes, lines or line_bytes, by name in `what`."""

    def __init__(self, what: str, value: int, limit: int) -> None:
        words = {"bytes": "the file has more bytes", "lines": "the file has more lines"}
        begin = words.get(what, f"line {value} of the file has more bytes")
        found = "" if what == "line_bytes" else f": {value} came"
        super().__init__(f"{begin} than the {limit} that are taken{found}")
        self.what, self.value, self.limit = what, value, limit


class Damaged(FilesError):  # noqa: N818
    """What is on disk is not what was written."""


class FolderShared(FilesError):  # noqa: N818
    """The folder is used by a process with another queue, by name."""

    def __init__(self, root: Path, name: str) -> None:
        super().__init__(
            f"files_dir {root} is used by API process {name}, of which this Redis has not heard: with another one both"
            " would run the same batches. Give each its own folder, or end that process"
        )


class StorageFailed(FilesError):  # noqa: N818
    """The disk is full or refuses."""
