"""All that is known so far: on the screen at once, in the JSON file after every check, in a table at the end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .catalogue import CHECKS, Check
from .found import FAILED, MISSED, PASSED, SKIPPED, Found

_FIGURE_WIDTH, _WHY_WIDTH = 72, 300
#: Facts in which two runs agree whose results may stand in one file.
_ALIKE = ("card", "driver", "torch", "triton", "transformers", "commit")


class Board:
    """Safe to use from several threads."""

    def __init__(self, path: Path, facts: Mapping[str, Any], rehearsed: bool, keep: bool = False) -> None:
        """With `keep`, what the file holds of the same machine and sources stays until it is checked anew."""
        self._path, self._facts, self._rehearsed = path, dict(facts), rehearsed
        self._began = time.monotonic()
        self._found: dict[str, Found] = {}
        self._lock = threading.Lock()
        self._earlier = self._read() if keep else {}

    def say(self, text: str) -> None:
        with self._lock:
            print(f"[{time.monotonic() - self._began:6.1f} s] {text}", flush=True)

    def note(self, check: Check, found: Found) -> None:
        """Keep a result, show it, and write all of them to the file."""
        more = "; ".join(filter(None, (found.figure, _short(found.why, _WHY_WIDTH))))
        self.say(f"{found.result:7} {check.full_name}: {more or 'as it should be'} ({found.seconds:.1f} s)")
        with self._lock:
            self._found[check.full_name] = found
            self._write()

    def _write(self) -> None:
        part = self._path.with_name(self._path.name + ".part")
        part.write_text(json.dumps(self._as_dict(), indent=1, ensure_ascii=False) + "\n")
        part.replace(self._path)

    def _as_dict(self) -> dict[str, Any]:
        checks = self._earlier | {name: found.as_dict() for name, found in self._found.items()}
        return {"machine": self._facts, "rehearsed": self._rehearsed, "checks": checks}

    def _read(self) -> dict[str, Any]:
        if not self._path.exists():
            return {}
        there = json.loads(self._path.read_text())
        same = all(there["machine"].get(name) == self._facts.get(name) for name in _ALIKE)
        return dict(there["checks"]) if same and there["rehearsed"] == self._rehearsed else {}

    def code(self, checks: Iterable[Check]) -> int:
        """0 when all of `checks` passed."""
        results = (self._found.get(check.full_name) for check in checks)
        return int(any(found is None or found.result != PASSED for found in results))

    def table(self) -> str:
        head = ("check", "result", "figure", "aim")
        rows = [
            head,
            *(_row(check, self._found[check.full_name]) for check in CHECKS if check.full_name in self._found),
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        counts = {
            kind: sum(found.result == kind for found in self._found.values()) for kind in (PASSED, MISSED, FAILED)
        }
        counts[SKIPPED] = len(self._found) - sum(counts.values())
        return "\n".join([*lines, ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)])


def _row(check: Check, found: Found) -> tuple[str, str, str, str]:
    figure = found.figure if found.result in (PASSED, MISSED) else found.why
    return check.full_name, found.result, _short(figure, _FIGURE_WIDTH), check.aim


def _short(text: str, width: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"
