"""What machine this is. A process of its own asks: torch may be missing, broken, or hang in a driver."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .folders import ROOT, command

_LIMIT_S = 90.0


def ask(environment: dict[str, str]) -> dict[str, Any]:
    """The facts, as a child finds them; `problem` says why there is no card that can be used."""
    try:
        done = subprocess.run(
            command("--facts"), env=environment, stdout=subprocess.PIPE, text=True, timeout=_LIMIT_S, check=False
        )
        found: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    except subprocess.TimeoutExpired:
        return {"problem": f"torch did not answer in {_LIMIT_S:.0f} s"}
    except ValueError:
        return {"problem": f"torch could not be asked (exit code {done.returncode})"}
    return found


def main() -> int:
    print(json.dumps(_gather()), flush=True)
    return 0


def _gather() -> dict[str, Any]:
    facts: dict[str, Any] = {"python": platform.python_version(), "kernel": platform.release(), "commit": _commit()}
    facts["cores"] = os.cpu_count()
    facts["compiler"] = next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), "none: Triton needs one")
    with contextlib.suppress(OSError):
        shm = os.statvfs("/dev/shm")
        facts["shm_free"] = shm.f_bavail * shm.f_frsize
    for name in ("torch", "triton", "transformers", "numpy", "safetensors"):
        with contextlib.suppress(PackageNotFoundError):
            facts[name] = version(name)
    missing = [name for name in ("torch", "triton", "transformers", "numpy", "safetensors") if name not in facts]
    if missing:
        return facts | {"problem": f"not installed: {', '.join(missing)}"}
    return facts | _card()


def _card() -> dict[str, Any]:
    try:
        import torch
    except Exception as error:
        return {"problem": f"torch cannot be imported: {error}"}
    found: dict[str, Any] = {"cuda": torch.version.cuda}
    if torch.version.cuda is None:
        return found | {"problem": "this torch was built without CUDA"}
    if not torch.cuda.is_available():
        return found | {"problem": "torch sees no GPU"}
    card = torch.cuda.get_device_properties(0)
    return found | {
        "card": card.name,
        "cards": torch.cuda.device_count(),
        "capability": [card.major, card.minor],
        "memory": card.total_memory,
        "driver": _driver(),
    }


def _driver() -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        said = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.split()
        return said[0] if said else ""
    with contextlib.suppress(OSError):
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", Path("/proc/driver/nvidia/version").read_text())
        return found[1] if found else ""
    return ""


def _commit() -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
        return subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    return ""


if __name__ == "__main__":
    sys.exit(main())
