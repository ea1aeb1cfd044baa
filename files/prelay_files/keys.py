"""Which batch a client's key stands for, so that a request that is sent again does not begin a second one."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import orjson

from . import durable

#: A key is forgotten so long after it was noted, seconds.
KEPT_S = 86_400.0


class KeyNote:
    """What stands under one key, in `root`/keys. Held by one at a time, in any process, until `close`."""

    def __init__(self, handle: int) -> None:
        """Use `take`."""
        self._handle = handle
        self.batch_id, self.digest, self.noted_at = _read(os.pread(handle, 4096, 0))

    def __repr__(self) -> str:
        return f"KeyNote({self.batch_id!r}, {self.digest!r})"

    @staticmethod
    def take(root: Path, key: str) -> KeyNote | None:
        """The note of `key`, which is a digest; None while somebody else holds it. Raise StorageFailed."""
        folder = root / "keys"
        with durable.translated():
            durable.make_folder(folder)
            handle = durable.hold(folder / key)
        return None if handle is None else KeyNote(handle)

    def write(self, batch_id: str, digest: str) -> None:
        """From now on the key stands for this batch, for good; `digest` is of what was asked. Raise StorageFailed."""
        self.batch_id, self.digest, self.noted_at = batch_id, digest, time.time()
        raw = orjson.dumps({"batch": batch_id, "digest": digest, "at": self.noted_at})
        with durable.translated():
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, raw, 0)
            os.fsync(self._handle)

    def close(self) -> None:
        os.close(self._handle)


def sweep(root: Path) -> Sequence[str]:
    """Remove the keys that nobody knows any more; return their names."""
    gone = []
    for path in (root / "keys").glob("*"):
        handle = durable.hold(path) if time.time() - path.stat().st_mtime > KEPT_S else None
        if handle is not None:
            path.unlink()
            os.close(handle)
            gone.append(path.name)
    return gone


def _read(raw: bytes) -> tuple[str, str, float]:
    """Batch, digest and time; empty where nothing was noted, or not to its end."""
    try:
        found = orjson.loads(raw)
        return str(found["batch"]), str(found["digest"]), float(found["at"])
    except (ValueError, KeyError, TypeError):
        return "", "", 0.0
