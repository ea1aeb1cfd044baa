"""The API processes that use a folder now. All must have one queue: with two, each batch would be run twice.

Each holds a lock on a file that has its name, which the kernel lets go of when the process dies.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from . import durable
from .errors import FolderShared

#: An API process whose queue lost its data is heard of there again so much later, at the most, seconds.
PATIENCE_S = 12.0
#: How often is looked meanwhile, seconds.
_LOOK_S = 0.2


class FolderUser:
    """One that uses the folder `root`, until `close`."""

    def __init__(self, root: Path, name: str) -> None:
        """`name` is what it is known by in its queue. Raise StorageFailed."""
        self._path = root / "users" / name
        with durable.translated():
            durable.make_folder(self._path.parent)
            while (handle := durable.hold(self._path)) is None:  # somebody looks at it at this moment
                time.sleep(0.01)
        self._handle = handle

    def __repr__(self) -> str:
        return f"FolderUser({self._path})"

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._handle)


def living(root: Path) -> Sequence[str]:
    """The names of those that use the folder; what the dead left of themselves goes."""
    found = []
    for path in (root / "users").glob("*"):
        if (handle := durable.hold(path)) is None:
            found.append(path.name)
            continue
        path.unlink(missing_ok=True)
        os.close(handle)
    return found


def check_queue(root: Path, known: Callable[[Sequence[str]], Collection[str]], patience_s: float = PATIENCE_S) -> None:
    """Raise FolderShared where somebody uses the folder whom our queue does not know, and does not come to know.

    `known` says which of these names it knows. Whoever uses the folder is known to its queue before.
    """
    until = time.monotonic() + patience_s
    while names := living(root):
        strangers = sorted(set(names) - set(known(names)))
        if not strangers:
            return
        if time.monotonic() > until:
            raise FolderShared(root, strangers[0])
        time.sleep(_LOOK_S)
