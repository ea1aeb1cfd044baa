"""The table of docs/gpu.md: what was checked on a card, with the figures of a JSON file, or that it never was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .catalogue import CHECKS, Check
from .found import FAILED, MISSED, PASSED

NEVER = "never run on hardware"
_WORDS = {PASSED: "", MISSED: "below its aim", FAILED: "fails"}


def load(path: Path | None) -> Mapping[str, Any] | None:
    """What a run left; None where there is no file, or only a rehearsal's, whose figures mean nothing."""
    if path is None or not path.exists():
        return None
    data: Mapping[str, Any] = json.loads(path.read_text())
    return None if data["rehearsed"] else data


def table(data: Mapping[str, Any] | None) -> str:
    """Markdown, a line a check."""
    checks = {} if data is None else data["checks"]
    lines = ["| check | what | aim | on hardware |", "|---|---|---|---|"]
    lines += [
        f"| `{check.full_name}` | {check.what} | {check.aim} | {_seen(check, checks)} |".replace("|  |", "| |")
        for check in CHECKS
    ]
    if data is not None:
        lines += ["", _machine(data["machine"])]
    return "\n".join(lines) + "\n"


def _seen(check: Check, checks: Mapping[str, Any]) -> str:
    found = checks.get(check.full_name)
    if found is None or found["result"] not in _WORDS:
        return NEVER
    word = _WORDS[found["result"]]
    text = found["why"] if found["result"] == FAILED else found["figure"]
    line = " ".join(text.replace("|", "/").split())[:160]
    return ": ".join(filter(None, (word, line))) or "passed"


def _machine(facts: Mapping[str, Any]) -> str:
    names = ("card", "driver", "cuda", "torch", "triton", "transformers", "python", "commit")
    return "Figures of: " + ", ".join(f"{name} {facts[name]}" for name in names if facts.get(name)) + "."
