"""Where the sources lie, and how a process finds them that nothing was installed for."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENTRY = ROOT / "scripts" / "gpu_check.py"
PAGE = ROOT / "docs" / "gpu.md"

_SOURCES = ("queue", "text", "workers/engine", "workers/kv", "workers/common")


def search_path() -> list[str]:
    """Folders that come before all others, and stand-ins for what is missing here."""
    found = [str(ROOT / source) for source in _SOURCES]
    if find_spec("orjson") is None:
        found.append(str(Path(__file__).parent / "standins"))
    return found


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """What a child process is started with: all of `given`, the sources, and nothing that reaches for a network."""
    before = given.get("PYTHONPATH")
    path = os.pathsep.join([*search_path(), *([before] if before else [])])
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**given, **offline, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def command(*arguments: str) -> list[str]:
    """This program once more, in another role."""
    return [sys.executable, str(ENTRY), *arguments]
