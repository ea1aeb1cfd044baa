"""Names of files and batches. They begin with their time, so that sorted by name they are sorted by age."""

from __future__ import annotations

import re
import secrets
import time

_FILE = re.compile(r"file-[0-9a-f]{24}")
_BATCH = re.compile(r"batch_[0-9a-f]{24}")


def new_file_id() -> str:
    return f"file-{_stamp()}"


def new_batch_id() -> str:
    return f"batch_{_stamp()}"


def is_file_id(text: str) -> bool:
    """Whether it may be the name of a file. What comes from outside and is none never becomes a path."""
    return _FILE.fullmatch(text) is not None


def is_batch_id(text: str) -> bool:
    """The same for a batch."""
    return _BATCH.fullmatch(text) is not None


def _stamp() -> str:
    """12 hex digits of milliseconds since 1970 and 12 random ones."""
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(6)}"
