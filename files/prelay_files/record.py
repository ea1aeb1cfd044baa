"""What was asked of a batch. Written once; nothing in it changes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import orjson

from .errors import Damaged


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """Times are seconds since 1970; `expires_at` is when the completion window ends.

    `fleet` is whom it was asked of; folders outlive fleets, and another one has another model. Empty: anybody.
    """

    id: str
    endpoint: str
    input_file_id: str
    completion_window_s: int
    created_at: int
    expires_at: int
    metadata: dict[str, str] = field(default_factory=dict)
    fleet: str = ""

    def encode(self) -> bytes:
        return orjson.dumps(asdict(self))

    @classmethod
    def decode(cls, raw: bytes) -> BatchRecord:
        """Raise Damaged when it is not a record."""
        try:
            record = cls(**orjson.loads(raw))
        except (ValueError, TypeError) as error:
            raise Damaged(f"not the record of a batch ({error}): {raw[:100]!r}") from None
        if not record._is_sound():
            raise Damaged(f"not the record of a batch: {raw[:100]!r}")
        return record

    def _is_sound(self) -> bool:
        texts: tuple[Any, ...] = (self.id, self.endpoint, self.input_file_id, self.fleet)
        numbers: tuple[Any, ...] = (self.completion_window_s, self.created_at, self.expires_at)
        metadata: Any = self.metadata
        return (
            all(isinstance(each, str) for each in texts)
            and all(type(each) is int for each in numbers)
            and isinstance(metadata, dict)
            and all(isinstance(each, str) for pair in metadata.items() for each in pair)
        )
