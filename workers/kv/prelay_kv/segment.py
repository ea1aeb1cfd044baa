"""Where exported KV memory is, in words that any process can read."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from .checks import MAX_NBYTES, exact_fields, need_int, need_text
from .errors import BadKvRef

SHM_DIR = Path("/dev/shm")  # noqa: S108 - this is the folder meant, not a temporary file

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def domain(shm_dir: Path = SHM_DIR) -> str:
    """The KV domain of this process: short hex, equal for two processes exactly when they share `shm_dir`.

    The boot id tells hosts apart (host names repeat), the device number tells apart containers with a
    /dev/shm of their own.
    """
    text = f"{_BOOT_ID.read_text().strip()} {shm_dir.stat().st_dev}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Segment:
    """One exported pool: which memory, whose, and where in it the blocks are. Holds no pointer and no process id.

    `node` is the KV domain it can be mapped in, `owner` the incarnation of the worker that writes it, `handle`
    what the transport of `kind` opens (shm: a file name), `offset` and `nbytes` the range of the blocks in it.
    """

    node: str
    owner: str
    device: str
    kind: str
    handle: str
    offset: int
    nbytes: int
    layout_hash: str
    numerics_hash: str

    def __post_init__(self) -> None:
        for name in ("node", "owner", "device", "kind", "handle", "layout_hash", "numerics_hash"):
            need_text(name, getattr(self, name))
        need_int("offset", self.offset, 0)
        need_int("nbytes", self.nbytes, 1, MAX_NBYTES)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: object) -> Segment:
        """Raise ValueError when `data` is not a segment."""
        return cls(**exact_fields(cls, data))

    def encode(self) -> bytes:
        return orjson.dumps(self.as_dict())

    @classmethod
    def decode(cls, raw: bytes) -> Segment:
        """Raise BadKvRef, with the raw bytes kept, when `raw` is not a segment."""
        try:
            return cls.from_dict(orjson.loads(raw))
        except ValueError as error:
            raise BadKvRef(raw, str(error)) from None
