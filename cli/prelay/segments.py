"""KV segments in /dev/shm that dead workers left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .host import SHM

#: Runs where it may import what it likes (torch among it): the supervisor itself stays small.
_SWEEP = "from prelay_kv.shm import sweep; print(len(sweep()))"


def segment_files(folder: Path = SHM) -> list[Path]:
    """Return all segment files, of the living and the dead."""
    return sorted(folder.glob("prelay-*.kv"))


def sweep_segments() -> int:
    """Remove the segments whose owners are dead, and return how many. Those in use are left alone."""
    if not segment_files():
        return 0
    done = subprocess.run([sys.executable, "-P", "-c", _SWEEP], capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 and done.stdout.strip().isdigit() else 0
