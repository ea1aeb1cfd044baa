"""`prelay bench` as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .forks import ROOT
from .servers import die_with_parent


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start it; what it says is in pipes."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PRELAY_")}
    return subprocess.Popen(
        [sys.executable, "-m", "prelay", "bench", *arguments],
        cwd=ROOT, env={**kept, "OMP_NUM_THREADS": "1", **environment}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=die_with_parent,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], timeout_s: float = 100) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return process.returncode, out, err


def report(*arguments: str, **environment: str) -> dict[str, Any]:
    """Run it to a good end and return what it reports."""
    code, out, err = finish(start(*arguments, "--json", "-", **environment))
    assert code == 0, err
    return dict(json.loads(out))


def leftovers(temporary: Path) -> list[str]:
    """What is left in the folder for temporary files of a run that has ended."""
    return sorted(path.name for path in temporary.iterdir())
