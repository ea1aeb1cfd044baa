"""The result for people and for machines."""

from __future__ import annotations

import json
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import __version__
from .finding import Finding, Result, State

_MARKS = {State.OK: ("✓", "green"), State.WARN: ("!", "bold yellow"), State.FAIL: ("✗", "bold red")}


def show(result: Result, console: Console) -> None:
    """Print a table that fits any width: what to do stands under what was found, and nothing is cut off."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    group = ""
    for row in result.rows:
        if row.group != group:
            table.add_row("", Text(row.group, style="bold"))
            group = row.group
        mark, style = _MARKS[row.finding.state]
        table.add_row(Text(mark, style=style), row.name, _words(row.finding))
    console.print(table)
    console.print()
    for line in _last_lines(result):
        console.print(Text(line))


def _words(finding: Finding) -> Text:
    if not finding.advice:
        return Text(finding.found)
    return Text.assemble(finding.found, "\n", (f"→ {finding.advice}", "bold"))


def _last_lines(result: Result) -> Iterator[str]:
    if result.skipped:
        yield f"not looked at, for what failed above: {', '.join(result.skipped)}"
    warned, failed = result.count(State.WARN), result.count(State.FAIL)
    yield f"{result.count(State.OK)} ok, {warned} to look at, {failed} failed"


def as_json(result: Result) -> str:
    """One object; `checks` in the order of the table. `items` holds every name, also those the table leaves out."""
    checks = [
        {
            "group": row.group,
            "name": row.name,
            "state": row.finding.state,
            "found": row.finding.found,
            "advice": row.finding.advice,
            "items": row.finding.items,
        }
        for row in result.rows
    ]
    whole = {"prelay": __version__, "ok": result.is_sound, "checks": checks, "skipped": result.skipped}
    return json.dumps(whole, ensure_ascii=False, indent=2)
