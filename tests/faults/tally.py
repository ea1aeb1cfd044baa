"""How much the fault tests have checked in this process: answers' tokens, each once, and cases that ended well."""

from __future__ import annotations

import threading

_lock = threading.Lock()
_counts = {"tokens": 0, "cases": 0}


def add(tokens: int = 0, cases: int = 0) -> None:
    """Count what was checked and found right."""
    with _lock:
        _counts["tokens"] += tokens
        _counts["cases"] += cases


def counts() -> dict[str, int]:
    with _lock:
        return dict(_counts)
