"""A process for which the file system is read-only, but for some folders, as a container with `read_only` has it.

It needs a mount namespace of its own, which only root gets, and not in every container.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

#: Arguments: an empty folder for a /tmp, the folders that may be written to, --, the command. It replaces itself.
_SCRIPT = """
set -e
mount --make-rprivate /
mount -t tmpfs -o mode=1777 tmpfs "$1"
shift
while [ "$1" != -- ]; do
    mount --bind "$1" "$1"
    shift
done
shift
mount -o remount,ro,bind /
exec "$@"
"""


def confined(command: Sequence[str], tmp: Path, writable: Iterable[Path]) -> list[str]:
    """Return the command as one that writes nowhere but to `writable`, `tmp` (which is empty for it) and /dev/shm."""
    return ["unshare", "--mount", "sh", "-c", _SCRIPT, "confined", str(tmp), *map(str, writable), "--", *command]


@cache
def can_confine() -> bool:
    """Whether that works here, and keeps a process from writing."""
    with tempfile.TemporaryDirectory() as name:
        tmp, open_, shut = (Path(name) / part for part in ("tmp", "open", "shut"))
        for folder in (tmp, open_, shut):
            folder.mkdir()

        def writes(folder: Path) -> bool:
            command = confined(["touch", str(folder / "file")], tmp, [open_])
            try:
                return subprocess.run(command, capture_output=True, check=False, timeout=20).returncode == 0
            except OSError:  # no unshare here
                return False

        return writes(open_) and not writes(shut)
