"""What a person sees of a batch: a bar where stderr is a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn
from rich.table import Column

from ..report import Report
from .batch import Batch
from .rate import Rate
from .server import BatchServer

#: Between two looks, seconds: at first, and when a batch takes long.
SOON_S, LATER_S = 0.5, 2.0
#: After so many seconds it takes long.
LONG_S = 120.0
#: Where nobody sees a bar, a line comes with each status and each further tenth, and at least so often, seconds.
LINE_S = 30.0

Show = Callable[[Batch], None]


def watch(server: BatchServer, batch_id: str, report: Report, sleep: Callable[[float], None] = time.sleep) -> Batch:
    """Show a batch until it is over, and return it. An interrupt leaves it alone."""
    begun = time.monotonic()
    with shown(report) as show:
        while True:
            batch = server.batch(batch_id)
            show(batch)
            if batch.is_over:
                return batch
            sleep(SOON_S if time.monotonic() - begun < LONG_S else LATER_S)


@contextmanager
def shown(report: Report) -> Iterator[Show]:
    """Give a function that shows a batch as it is now."""
    if not report.console.is_terminal:
        yield _Lines(report.say)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None, table_column=Column(ratio=1)),
        TextColumn("{task.fields[counts]}"),
        TextColumn("{task.fields[speed]}"),
    )
    with Progress(*columns, console=report.console, transient=True, expand=True, refresh_per_second=4) as bars:
        yield _Bar(bars, bars.add_task("asking", total=None, counts="", speed=""))


class _Bar:
    def __init__(self, bars: Progress, task: TaskID) -> None:
        self._bars, self._task, self._rate = bars, task, Rate()

    def __call__(self, batch: Batch) -> None:
        self._rate.see(time.monotonic(), batch)
        failed = f" [red]{batch.failed:,} failed[/red]" if batch.failed else ""
        self._bars.update(
            self._task,
            description=batch.status,
            completed=batch.ended,
            total=batch.total or None,
            counts=f"{batch.ended:,}/{batch.total:,}{failed}" if batch.total else "",
            speed=speed(self._rate),
        )


class _Lines:
    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._rate = say, Rate()
        self._status, self._tenth, self._said_at = "", -1, 0.0

    def __call__(self, batch: Batch) -> None:
        now = time.monotonic()
        self._rate.see(now, batch)
        tenth = batch.ended * 10 // batch.total if batch.total else -1
        if batch.status == self._status and tenth <= self._tenth and now - self._said_at < LINE_S:
            return
        self._status, self._tenth, self._said_at = batch.status, tenth, now
        failed = f", {batch.failed:,} failed" if batch.failed else ""
        counts = f" {batch.ended:,} of {batch.total:,}{failed}" if batch.total else ""
        self._say(f"… {batch.status}{counts}  {speed(self._rate)}".rstrip())


def speed(rate: Rate) -> str:
    """How fast it goes and how long it will take: `812 tok/s  eta 1:02:03`."""
    if not rate.has_begun:
        return ""
    tokens, lines, left = rate.tokens_per_s(), rate.lines_per_s(), rate.left_s()
    words = [f"{tokens:,.0f} tok/s"] if tokens is not None else [f"{lines:,.1f} lines/s"] if lines is not None else []
    return "  ".join(words + ([f"eta {clock(left)}"] if left is not None else []))


def clock(seconds: float) -> str:
    """0:07, 12:34, 5:06:07."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def transfer(report: Report) -> Iterator[Callable[[str, int, int], None]]:
    """Give a function that shows how much of a file was sent or fetched. Where no bar can be seen, nothing is said."""
    if not report.console.is_terminal:
        yield lambda _what, _done, _whole: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=report.console, transient=True, refresh_per_second=4) as bars:
        tasks: dict[str, TaskID] = {}

        def tell(what: str, done: int, whole: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=whole or None)
            bars.update(tasks[what], completed=done)

        yield tell
