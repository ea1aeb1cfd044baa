"""Trace marks: when each stage of a job was passed, for measuring where time goes. Off unless PRELAY_TRACE is set.

PRELAY_TRACE names a folder; each process writes `<pid>.jsonl` into it, a line a mark: [monotonic ns, point, job, seq].
The monotonic clock is one for all processes of a host, so marks of different processes can be compared.
Points, in the order of a job's life: api.submit, prefill.start, prefill.sampled, decode.start, decode.copied,
step.end (per token), api.send (per token, just before the socket write).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TextIO

import orjson

_folder = os.environ.get("PRELAY_TRACE")
_file: TextIO | None = None


def mark(point: str, job: str, seq: int = 0) -> None:
    """Note that `job` passed `point` now."""
    if _folder is None:
        return
    global _file
    if _file is None:
        Path(_folder).mkdir(parents=True, exist_ok=True)
        _file = (Path(_folder) / f"{os.getpid()}.jsonl").open("a", buffering=1)  # a line is one write
    _file.write(orjson.dumps([time.monotonic_ns(), point, job, seq]).decode() + "\n")
