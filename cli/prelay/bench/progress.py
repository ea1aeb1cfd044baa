"""How far a measurement is: a bar on stderr, and only where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: (what is being done, how much of it, of how much); of an unknown whole: 0.
Tell = Callable[[str, float, float], None]


@contextmanager
def progress() -> Iterator[Tell]:
    if not sys.stderr.isatty():
        yield lambda _what, _done, _whole: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:g}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2) as bars:
        task = bars.add_task("", total=None)
        yield lambda what, done, whole: bars.update(task, description=what, completed=done, total=whole or None)
