"""Errors of files on disk.

FilesError
├── FileMissing       no file or batch of this id
├── FileTooLarge      a file is beyond a limit, which the message names together with the value
├── Damaged           what is on disk is not what was written
└── StorageFailed     the disk is full or refuses
"""

from __future__ import annotations


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


class StorageFailed(FilesError):  # noqa: N818
    """The disk is full or refuses."""
