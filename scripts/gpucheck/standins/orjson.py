"""What Prelay uses of orjson, by json: put on the path only where orjson is not installed."""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from typing import Any

JSONDecodeError = json.JSONDecodeError


def dumps(value: Any) -> bytes:
    return json.dumps(value, default=_plain, separators=(",", ":"), ensure_ascii=False).encode()


def loads(raw: bytes | str) -> Any:
    return json.loads(raw)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
