"""The file of a pool: its name, its parts, its locks.

    0            header: magic, version, length of the JSON, JSON {owner, layout} and maybe cuda
    PAGE         generation table, one uint64 per block in the host's byte order
    next page    the blocks; the file ends here when they lie on a GPU

The owner holds an exclusive flock for its life. A file whose lock is free has no owner: process ids mean nothing
across containers, locks do. Who has a GPU's blocks mapped holds a shared lock of the other kind, on the first byte.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from .checks import MAX_NBYTES, exact_fields, need_int, need_text
from .layout import KvLayout

#: Alignment of the parts in bytes; also the size of the header.
PAGE = 4096
MAGIC = b"PRELAYKV"
VERSION = 1

_HEAD = struct.Struct("<8sII")
#: struct flock of a 64-bit Linux: type, whence, start, length, process.
_RANGE = struct.Struct("@hhqqi4x")
_NAME = re.compile(r"prelay-[A-Za-z0-9._-]{1,100}\.kv")


@dataclass(frozen=True, slots=True)
class Parts:
    """Offsets and size of a pool's file in bytes."""

    generations: int
    blocks: int
    nbytes: int

    @classmethod
    def of(cls, layout: KvLayout) -> Parts:
        beside = cls.beside(layout)
        return cls(generations=PAGE, blocks=beside.blocks, nbytes=beside.blocks + layout.nbytes)

    @classmethod
    def beside(cls, layout: KvLayout) -> Parts:
        """The file beside blocks that lie elsewhere: it ends where they would begin."""
        blocks = PAGE + -(-layout.num_blocks * 8 // PAGE) * PAGE
        return cls(generations=PAGE, blocks=blocks, nbytes=blocks)


@dataclass(frozen=True, slots=True)
class CudaExport:
    """An allocation on a GPU as other processes find it. The blocks begin at its first byte.

    `handle` is what CUDA IPC opens, hex of 64 bytes. Another incarnation's memory can have had the same, so behind
    the blocks lies `stamp`, hex of 32 random bytes: memory that does not hold it there is not this one. `nbytes` is the
    size of the whole allocation, `uuid` the device's. ValueError when a field is none of that.
    """

    handle: str
    uuid: str
    nbytes: int
    stamp: str

    def __post_init__(self) -> None:
        _need_hex("handle", self.handle, 64)
        _need_hex("stamp", self.stamp, 32)
        need_text("uuid", self.uuid)
        need_int("nbytes", self.nbytes, 1, MAX_NBYTES)


def _need_hex(name: str, value: object, nbytes: int) -> None:
    if not isinstance(value, str) or re.fullmatch(f"[0-9a-f]{{{2 * nbytes}}}", value) is None:
        raise ValueError(f"{name} must be the hex of {nbytes} bytes, not {value!r:.40}")


@dataclass(frozen=True, slots=True)
class Header:
    """What the first page of a file says. `cuda` is None when the blocks are in the file."""

    owner: str
    layout: KvLayout
    cuda: CudaExport | None = None


def is_name(text: str) -> bool:
    """Whether `text` can be a pool's file name: no folder in it, and nothing but this package's names."""
    return _NAME.fullmatch(text) is not None


def new_name(owner: str) -> str:
    readable = re.sub(r"[^A-Za-z0-9._-]+", "_", owner)[:64]
    return f"prelay-{readable}-{secrets.token_hex(8)}.kv"


def pack_header(header: Header) -> bytes:
    data: dict[str, Any] = {"owner": header.owner, "layout": header.layout}
    if header.cuda is not None:
        data["cuda"] = header.cuda
    body = orjson.dumps(data)
    page = _HEAD.pack(MAGIC, VERSION, len(body)) + body
    assert len(page) <= PAGE  # its texts are limited
    return page


def read_header(page: bytes) -> Header:
    """The header as the first page of a file states it; ValueError when it is not a pool's."""
    if len(page) < _HEAD.size:
        raise ValueError("the file is shorter than its header")
    magic, version, length = _HEAD.unpack_from(page)
    if magic != MAGIC:
        raise ValueError("the file is not a KV pool")
    if version != VERSION:
        raise ValueError(f"the file has format {version}, this worker reads {VERSION}")
    if length > len(page) - _HEAD.size:
        raise ValueError("the header is longer than its page")
    data = orjson.loads(page[_HEAD.size : _HEAD.size + length])
    if not isinstance(data, dict) or not isinstance(data.get("owner"), str):
        raise ValueError("the header names no owner")
    cuda = CudaExport(**exact_fields(CudaExport, data["cuda"])) if "cuda" in data else None
    return Header(data["owner"], KvLayout.from_dict(data.get("layout")), cuda)


def create_locked(folder: Path, owner: str) -> tuple[int, Path]:
    """A new empty file of mode 0600 and the descriptor that holds its lock.

    Between creating and locking, a sweep may take the file for a dead owner's: then it is left to that sweep and
    another one made.
    """
    while True:
        path = folder / new_name(owner)
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            if try_lock(fd) and os.fstat(fd).st_nlink:
                return fd, path
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise
        os.close(fd)


def try_lock(fd: int) -> bool:
    """Take the exclusive lock if it is free. It belongs to the open file, so closing every descriptor frees it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def hold(fd: int) -> None:
    """Say that the blocks are mapped here, until `fd` and all its duplicates are closed or the process has ended.

    The lock belongs to the open file. It is of the other kind than the owner's, and neither keeps the other out.
    """
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _RANGE.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0))


def let_go(fd: int) -> None:
    """Undo `hold`."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _RANGE.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 1, 0))


def is_held(fd: int) -> bool:
    """Whether anybody holds the file whose owner's descriptor is `fd`."""
    found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _RANGE.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
    return bool(_RANGE.unpack(found)[0] != fcntl.F_UNLCK)
