"""What a check found, and what all of them did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """How bad it is: a warning will hurt later; with a failure `prelay serve` does not work, or a promise is broken."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """The value that was found, and what to do about it. `items` are all names that `found` may show only some of."""

    state: State
    found: str
    advice: str = ""
    items: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """A finding under the name of its check."""

    group: str
    name: str
    finding: Finding


@dataclass(frozen=True, slots=True)
class Result:
    """Rows in the order of the checks, and the names of those that had nothing to look at."""

    rows: tuple[Row, ...]
    skipped: tuple[str, ...] = ()

    @property
    def is_sound(self) -> bool:
        return self.count(State.FAIL) == 0

    def count(self, state: State) -> int:
        return sum(row.finding.state is state for row in self.rows)


def ok(found: str, items: Sequence[str] = ()) -> Finding:
    return Finding(State.OK, found, items=tuple(items))


def warn(found: str, advice: str, items: Sequence[str] = ()) -> Finding:
    return Finding(State.WARN, found, advice, tuple(items))


def fail(found: str, advice: str = "", items: Sequence[str] = ()) -> Finding:
    return Finding(State.FAIL, found, advice, tuple(items))


def some(items: Sequence[str], shown: int = 3) -> str:
    """The first items, and how many more there are."""
    more = f" and {len(items) - shown} more" if len(items) > shown else ""
    return ", ".join(items[:shown]) + more
