"""KV segments in /dev/shm, for the supervisor: it must stay small, so nothing here may import torch (a test looks)."""

from __future__ import annotations

from pathlib import Path

from prelay_kv.sweep import sweep

from .host import SHM


def segment_files(folder: Path = SHM) -> list[Path]:
    """Return all segment files, of the living and the dead."""
    return sorted(folder.glob("prelay-*.kv"))


def sweep_segments() -> int:
    """Remove the segments whose owners are dead, and return how many. Those in use are left alone."""
    return len(sweep())
