"""What a check found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

PASSED = "passed"
#: It works, and is slower than it should be.
MISSED = "missed"
FAILED = "failed"
SKIPPED = "skipped"


class Wrong(Exception):  # noqa: N818 - reads as the fact it states
    """What was computed is not what it must be; the message says what differs."""


@dataclass(frozen=True, slots=True)
class Found:
    """The result of one check. `figure` is for people, `numbers` for programs; `why` says what is wrong."""

    result: str
    figure: str = ""
    why: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)
    trace: str = ""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def passed(figure: str = "", **numbers: Any) -> Found:
    return Found(PASSED, figure, numbers=numbers)


def aimed(reached: bool, figure: str, why: str = "below its aim", **numbers: Any) -> Found:
    """Passed if the aim was `reached`, else missed."""
    return Found(PASSED if reached else MISSED, figure, "" if reached else why, numbers)


def need(holds: bool, what: str) -> None:
    """Wrong unless it `holds`."""
    if not holds:
        raise Wrong(what)
