"""From prompts to the lines of a batch. Nothing here reads a file by itself, and nothing holds more than a line."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from ..errors import BadUsage

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ENDPOINTS = (COMPLETIONS, CHAT)
#: Characters of one field of a CSV file; the server's own limit of a line is lower.
_FIELD_CHARS = 1 << 24


@dataclass(frozen=True, slots=True)
class Shape:
    """What becomes of a prompt: a completion, or the user message of a chat. No model: the first one served."""

    model: str = ""
    chat: bool = False
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None

    @property
    def endpoint(self) -> str:
        return CHAT if self.chat else COMPLETIONS

    def line(self, custom_id: str, prompt: str) -> bytes:
        """Return one line, with its end."""
        body: dict[str, Any] = {"model": self.model}
        if self.chat:
            system = [{"role": "system", "content": self.system}] if self.system is not None else []
            body["messages"] = [*system, {"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        optional = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        body |= {name: value for name, value in optional.items() if value is not None}
        return orjson.dumps({"custom_id": custom_id, "method": "POST", "url": self.endpoint, "body": body}) + b"\n"


def from_text(rows: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (custom id, prompt) of each line that is not blank. Its id is its number: line-1 is the first."""
    for number, row in enumerate(rows, 1):
        prompt = row.rstrip("\r\n")
        if prompt.strip():
            yield f"line-{number}", prompt


def from_csv(rows: Iterable[str], prompt_column: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield (custom id, prompt) of each row. Without a column custom_id its id is its number: row-1 is the first.

    Raise BadUsage for a missing column, a row that lacks the prompt, and what is no CSV.
    """
    csv.field_size_limit(_FIELD_CHARS)
    table = csv.DictReader(rows, strict=True)
    try:
        columns = list(table.fieldnames or ())
        if prompt_column not in columns:
            has = f"its columns are {', '.join(columns)}" if columns else "it is empty"
            raise BadUsage(f"{name} has no column {prompt_column!r} (--prompt-column): {has}")
        for number, row in enumerate(table, 1):
            prompt = row[prompt_column]
            if prompt is None:
                raise BadUsage(f"{name}, row {number}: no {prompt_column}")
            yield (row.get("custom_id") or f"row-{number}"), prompt
    except csv.Error as error:
        raise BadUsage(f"{name}, line {table.line_num}: no CSV: {error}") from None


def endpoint_of(line: bytes) -> str | None:
    """Return where a line of a batch goes, None if it does not say."""
    try:
        url = orjson.loads(line)["url"]
    except (ValueError, KeyError, TypeError):
        return None
    return url if url in ENDPOINTS else None
