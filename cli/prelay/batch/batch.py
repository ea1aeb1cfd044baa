"""A batch as its server describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CliError

#: Statuses after which nothing changes any more.
OVER = frozenset({"completed", "failed", "expired", "cancelled"})


@dataclass(frozen=True, slots=True)
class Batch:
    """One answer about a batch. Counts are of lines; times are seconds since 1970; no file: an empty name.

    `tokens` is how many were generated so far, None where the server does not say.
    """

    id: str
    status: str
    endpoint: str = ""
    total: int = 0
    completed: int = 0
    failed: int = 0
    tokens: int | None = None
    created_at: int = 0
    ended_at: int = 0
    output_file: str = ""
    error_file: str = ""
    errors: tuple[str, ...] = ()
    metadata: Mapping[str, str] | None = None

    @classmethod
    def decode(cls, body: Any) -> Batch:
        """Read OpenAI's batch object. Raise CliError when it is none."""
        try:
            counts = body.get("request_counts") or {}
            usage = body.get("usage") or {}
            return cls(
                id=str(body["id"]),
                status=str(body["status"]),
                endpoint=str(body.get("endpoint") or ""),
                total=int(counts.get("total") or 0),
                completed=int(counts.get("completed") or 0),
                failed=int(counts.get("failed") or 0),
                tokens=int(usage.get("output_tokens") or 0) if "usage" in body else None,
                created_at=int(body.get("created_at") or 0),
                ended_at=max(int(body.get(f"{status}_at") or 0) for status in OVER),
                output_file=str(body.get("output_file_id") or ""),
                error_file=str(body.get("error_file_id") or ""),
                errors=tuple(map(_in_words, (body.get("errors") or {}).get("data") or ())),
                metadata=dict(body.get("metadata") or {}),
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            raise CliError(f"the server's answer is no batch: {str(body)[:200]}") from None

    @property
    def is_over(self) -> bool:
        return self.status in OVER

    @property
    def ended(self) -> int:
        """Lines that have an answer or an error."""
        return self.completed + self.failed

    @property
    def exit_code(self) -> int:
        """0: every line has its answer; 1: some have none; 3: the batch did not come to its end."""
        if self.status != "completed":
            return 3
        return 1 if self.failed else 0


def _in_words(error: Mapping[str, Any]) -> str:
    line = error.get("line")
    return f"{error.get('message')}" + (f" (line {line})" if line is not None else "")
