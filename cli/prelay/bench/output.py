"""Where a report goes: a table on stdout, JSON and a picture in files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import BadUsage, CliError
from .plot import Panel, draw

#: (title, headings, rows): one table.
Sheet = tuple[str, Sequence[str], Sequence[Sequence[object]]]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the user asked for. `json` is a file, or - for stdout, which then holds nothing else."""

    json: str | None = None
    plot: str | None = None

    def check(self) -> None:
        """Before anything is measured: raise BadUsage for files that could not be written afterwards."""
        if self.plot is not None and not self.plot.endswith(".svg"):
            raise BadUsage(f"--plot writes SVG: name a file that ends in .svg, not {self.plot}")
        for option, name in (("--json", self.json), ("--plot", self.plot)):
            if name not in (None, "-") and not Path(name or "").absolute().parent.is_dir():
                raise BadUsage(f"{option} {name}: there is no such folder")


@dataclass(frozen=True, slots=True)
class Report:
    """`data` is all of it; sheets and panels are made of it for people, when they are wanted."""

    title: str
    data: dict[str, Any]
    sheets: Callable[[], Sequence[Sheet]]
    panels: Callable[[], Sequence[Panel]]


def deliver(report: Report, wanted: Wanted) -> None:
    """Write what was asked for. Raise CliError when a file cannot be written."""
    text = json.dumps(report.data, ensure_ascii=False, indent=1)
    if wanted.json == "-":
        print(text)
    else:
        _show(report)
    _write(wanted.json if wanted.json != "-" else None, lambda: text + "\n")
    _write(wanted.plot, lambda: draw(report.title, note_of(report.data["facts"]), report.panels()))


def _write(name: str | None, make: Callable[[], str]) -> None:
    if name is None:
        return
    try:
        Path(name).write_text(make(), encoding="utf-8")
    except OSError as error:
        raise CliError(f"cannot write {name}: {error.strerror}") from None
    print(f"wrote {name}", file=sys.stderr)


def note_of(facts: dict[str, Any]) -> str:
    """One line that says where and on what this was measured."""
    load = f"load {facts['load_at_start']} → {facts.get('load_at_end', '?')}"
    notes = [f"{name} {value}" for name, value in facts["notes"].items()]
    words = [f"prelay {facts['prelay']}", f"commit {facts['commit'] or 'unknown'}", facts["cpu"]]
    return " · ".join([*words, f"{facts['cores']} cores", f"torch {facts['torch']}", load, facts["date"][:10], *notes])


def _show(report: Report) -> None:
    """Print tables that are as wide as they must be: a figure that is cut off, or broken in two, is none."""
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 200)
    interrupted = " (interrupted: what was measured until then)" if report.data.get("interrupted") else ""
    console.print(Text(report.title + interrupted, style="bold"))
    console.print(Text(note_of(report.data["facts"]), style="dim"))
    for title, headings, rows in report.sheets():
        table = Table(title=title or None, title_justify="left", box=box.SIMPLE, pad_edge=False)
        for number, heading in enumerate(headings):
            table.add_column(heading, justify="left" if number == 0 else "right", overflow="fold")
        for row in rows:
            table.add_row(*(Text(shown(cell)) for cell in row))
        console.print(table)


def shown(cell: object) -> str:
    """Four figures are enough for people."""
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return f"{cell:.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"
    return str(cell)


def columns(figures: dict[str, float] | None, *names: str) -> list[float | None]:
    return [(figures or {}).get(name) for name in names]
