"""What a log line looks like: words for people, or one JSON object for machines. Prompts and answers are in neither.

A line about one job says so with `extra=about(job, epoch)`; a process that has a name of its own says it once, with
`name_process`.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

import orjson

TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"
_ABOUT = ("request", "job", "epoch")


def about(job: str, epoch: int | None = None) -> dict[str, Any]:
    """Fields of a line that is about one job: for `extra`."""
    fields = {"job": job, "request": job.rpartition("/")[0]}
    return fields if epoch is None else {**fields, "epoch": epoch}


class JsonLines(logging.Formatter):
    """A record as one line: time (UTC), level, logger, message, and what is known of worker, request, job and epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.process_fields: dict[str, str] = {}

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; what an exception says is in `exception`, with its line breaks escaped."""
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self.process_fields,
            **{name: getattr(record, name) for name in _ABOUT if hasattr(record, name)},
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return line_of(fields)


def line_of(fields: dict[str, Any]) -> str:
    """One JSON object in one line; text that is no Unicode is shown all the same."""
    try:
        return orjson.dumps(fields).decode()
    except TypeError:  # a lone surrogate, of a path perhaps
        safe = {name: str(value).encode(errors="replace").decode() for name, value in fields.items()}
        return orjson.dumps(safe).decode()


def set_up(level: str, form: str, stream: TextIO | None = None) -> None:
    """Log to stderr from `level` on; `form` is text or json. Nothing happens where somebody has set logging up."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def name_process(**fields: str) -> None:
    """From now on every JSON line of this process says this too."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonLines):
            handler.formatter.process_fields.update(fields)
