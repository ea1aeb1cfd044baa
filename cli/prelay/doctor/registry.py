"""Where checks are entered, and how they are run. A new check is one function.

    @checks.of("eviction", Facts.server)
    def eviction(server: Server) -> Finding: ...

The function judges what it is given and asks nothing itself, so that a test can give it anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import CliError
from .facts import Facts, NothingToLookAt
from .finding import Finding, Result, Row, fail

T = TypeVar("T")
Judge = Callable[[T], Finding]


@dataclass(frozen=True, slots=True)
class Check:
    """`subject` finds out what `judge` is about. It raises CliError where it cannot; `advice` is what to do then."""

    name: str
    subject: Callable[[Facts], Any]
    judge: Judge[Any]
    advice: str = ""


class Checks:
    """The checks of one part of the table, in its order."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.checks: list[Check] = []

    def __repr__(self) -> str:
        return f"Checks({self.group!r}, {[check.name for check in self.checks]})"

    def of(self, name: str, subject: Callable[[Facts], T], advice: str = "") -> Callable[[Judge[T]], Judge[T]]:
        """Enter a function as the check `name` of what `subject` finds out; `advice` is for when that fails."""

        def enter(judge: Judge[T]) -> Judge[T]:
            self.checks.append(Check(name, subject, judge, advice))
            return judge

        return enter


def run(groups: Iterable[Checks], facts: Facts) -> Result:
    """Run all checks; one failure does not keep the others from being seen.

    Where a fact cannot be found out, the first check that needs it fails with the reason, and the others that need it
    are skipped: their rows would only say the same again. Checks of what there is none of have no row.
    """
    rows: list[Row] = []
    skipped: list[str] = []
    said: set[int] = set()
    for group in groups:
        for check in group.checks:
            try:
                finding = check.judge(check.subject(facts))
            except NothingToLookAt:
                continue
            except CliError as error:
                if id(error) in said:  # `facts` keeps it and raises the same one again
                    skipped.append(check.name)
                    continue
                said.add(id(error))
                finding = fail(str(error), check.advice)
            rows.append(Row(group.group, check.name, finding))
    return Result(tuple(rows), tuple(skipped))
