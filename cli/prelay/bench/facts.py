"""What a figure is worth nothing without: the code, the machine and how busy it was."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from prelay_engine.cpu import this_cpu

from .. import __version__
from ..errors import BadUsage

#: Features that decide which kernels run.
_FEATURES = re.compile(r"avx2|avx512f|avx512_(bf16|vnni|fp16)|amx_\w+|asimd|sve2?|bf16|i8mm")
#: Load average per core above which other work disturbs a measurement.
BUSY = 0.5
#: What of a checkout is the product.
_SOURCES = ("api", "cli", "queue", "text", "workers")


def gather(notes: Sequence[str] = ()) -> dict[str, Any]:
    """The facts of this machine and this code. `notes` are NAME=VALUE, added by whoever measures. Raise BadUsage."""
    load = _load()
    cores = len(os.sched_getaffinity(0))
    return {
        "prelay": __version__,
        "commit": commit(Path(__file__).parents[3]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "cpu_features": sorted(name for name in this_cpu().flags if _FEATURES.fullmatch(name)),
        "cores": cores,
        "load_at_start": load,
        "busy_at_start": load > BUSY * cores,
        "python": platform.python_version(),
        "torch": _version_of("torch"),
        "transformers": _version_of("transformers"),
        "notes": _notes(notes),
    }


def begin(notes: Sequence[str] = ()) -> dict[str, Any]:
    """The facts before anything is measured; a machine that is busy with something else is warned of on stderr."""
    facts = gather(notes)
    if words := warning(facts):
        print(f"prelay: {words}", file=sys.stderr)
    return facts


def finish(facts: dict[str, Any]) -> None:
    """Add what is known at the end only."""
    facts["load_at_end"] = _load()


def warning(facts: dict[str, Any]) -> str | None:
    """A line to be said before anything is measured, where the machine was busy with something else."""
    if not facts["busy_at_start"]:
        return None
    load, cores = facts["load_at_start"], facts["cores"]
    return f"this machine is busy (load {load} on {cores} core(s)): what is measured now is worth little"


def commit(root: Path) -> str | None:
    """The commit of the checkout at `root`, "+dirty" where its sources differ; None where this is no checkout of it."""
    if not (root / ".git").exists() or not (root / "cli" / "prelay").is_dir():
        return None
    head = _git(root, "rev-parse", "--short=12", "HEAD")
    changed = _git(root, "status", "--porcelain", "--", *_SOURCES)
    return head and head + ("+dirty" if changed else "")


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _load() -> float:
    return round(os.getloadavg()[0], 2)


def _cpu_name(path: Path = Path("/proc/cpuinfo")) -> str:
    try:
        found = re.search(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", path.read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.machine()


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _notes(notes: Sequence[str]) -> dict[str, str]:
    for note in notes:
        if "=" not in note:
            raise BadUsage(f"--note must be NAME=VALUE, not {note!r}")
    return {name.strip(): value.strip() for name, _, value in (note.partition("=") for note in notes)}
