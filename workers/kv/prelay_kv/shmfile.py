"""The file of a shared-memory pool: its name, its parts, its lock.

    0            header: magic, version, length of the JSON, JSON {owner, layout}
    PAGE         generation table, one uint64 per block in the host's byte order
    next page    the blocks

The owner holds an exclusive flock for its life. A file whose lock is free has no owner: process ids mean nothing
across containers, locks do.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import struct
from dataclasses import dataclass
from pathlib import Path

import orjson

from .layout import KvLayout

#: Alignment of the parts in bytes; also the size of the header.
PAGE = 4096
MAGIC = b"PRELAYKV"
VERSION = 1

_HEAD = struct.Struct("<8sII")
_NAME = re.compile(r"prelay-[A-Za-z0-9._-]{1,100}\.kv")


@dataclass(frozen=True, slots=True)
class Parts:
    """Offsets and size of a pool's file in bytes."""

    generations: int
    blocks: int
    nbytes: int

    @classmethod
    def of(cls, layout: KvLayout) -> Parts:
        blocks = PAGE + -(-layout.num_blocks * 8 // PAGE) * PAGE
        return cls(generations=PAGE, blocks=blocks, nbytes=blocks + layout.nbytes)


def is_name(text: str) -> bool:
    """Whether `text` can be a pool's file name: no folder in it, and nothing but this package's names."""
    return _NAME.fullmatch(text) is not None


def new_name(owner: str) -> str:
    readable = re.sub(r"[^A-Za-z0-9._-]+", "_", owner)[:64]
    return f"prelay-{readable}-{secrets.token_hex(8)}.kv"


def pack_header(owner: str, layout: KvLayout) -> bytes:
    body = orjson.dumps({"owner": owner, "layout": layout.as_dict()})
    header = _HEAD.pack(MAGIC, VERSION, len(body)) + body
    assert len(header) <= PAGE  # its texts are limited
    return header


def read_header(page: bytes) -> tuple[str, KvLayout]:
    """Owner and layout as the first page of a file states them; ValueError when it is not a pool's."""
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
    return data["owner"], KvLayout.from_dict(data.get("layout"))


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
