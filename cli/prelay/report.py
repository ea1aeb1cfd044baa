"""What `prelay serve` and `prelay model` show while they work: on stderr, plain where it is no terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.status import Status
from rich.text import Text

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue")

Tell = Callable[[str, float], None]


class _Console(Console):
    """Rich's own ends the program when the reader of its output is gone."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Report:
    """Steps that are done, one line that says what is waited for, and the children's lines between them.

    Nobody need read it: when the terminal is closed or the reader of a pipe ends, it falls silent for good. What it
    reports on goes on.
    """

    def __init__(self, *, json: bool = False) -> None:
        """`json`: every line is an object, as those of the children then are."""
        self.console = _Console(file=sys.stderr, highlight=False, force_terminal=False if json else None)
        self._json = json
        self._status: Status | None = None
        self._waiting_for = ""
        self._names: list[str] = []
        self._heard = True

    def step(self, text: str) -> None:
        if self._json:
            return self.say(text)
        self._print(Text.assemble(("✓ ", "bold green"), text))

    def warn(self, text: str) -> None:
        if self._json:
            return self.say(text, "warning")
        self._print(Text.assemble(("! ", "bold yellow"), (text, "bold")))

    def say(self, text: str, level: str = "info") -> None:
        if self._json:
            text = _object(level=level, process="serve", message=text)
        self._print(Text(text))

    def child_line(self, name: str, line: str) -> None:
        """Print one line of a child, its name in front."""
        if self._json:
            self._print(Text(_of_child(name, line)))
            return
        if name not in self._names:
            self._names.append(name)
        colour = _COLOURS[self._names.index(name) % len(_COLOURS)]
        self._print(Text.assemble((f"{name:>9} │ ", colour), line))

    def waiting(self, text: str) -> None:
        """Say what is being waited for; the same text again says nothing."""
        if text == self._waiting_for:
            return
        self._waiting_for = text
        if not self.console.is_terminal:
            self.say(f"… {text}")
            return
        with self._if_heard():
            if self._status is None:
                self._status = self.console.status(Text(text))
                self._status.start()
            else:
                self._status.update(Text(text))

    def settled(self) -> None:
        """Nothing is waited for any more."""
        self._waiting_for = ""
        status, self._status = self._status, None
        if status is not None:
            with self._if_heard():
                status.stop()

    def _print(self, text: Text) -> None:
        if self._heard:
            with self._if_heard():
                self.console.print(text, soft_wrap=True)

    @contextmanager
    def _if_heard(self) -> Iterator[None]:
        """Output that cannot be written says nothing about the work."""
        try:
            yield
        except (OSError, ValueError):  # ValueError: the file is closed
            self._heard = False

    @contextmanager
    def progress(self) -> Iterator[Tell]:
        """Give a function `tell(what, share done 0…1)` that draws a bar, or lines where it is no terminal."""
        if not self.console.is_terminal:
            yield _in_lines(self.say)
            return
        columns = (TextColumn("{task.description:<12}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True) as bars:
            tasks: dict[str, object] = {}

            def tell(what: str, done: float) -> None:
                if what not in tasks:
                    tasks[what] = bars.add_task(what, total=1.0)
                bars.update(tasks[what], completed=done)  # type: ignore[arg-type]

            yield tell


def _object(**fields: str) -> str:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": now, **fields})


def _of_child(name: str, line: str) -> str:
    """A child's line as an object that names the child. What it printed beside its log becomes a message."""
    try:
        fields = json.loads(line)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        return _object(level="info", process=name, message=line)
    return json.dumps({"process": name, **fields})


def _in_lines(say: Callable[[str], None]) -> Tell:
    """A line for each new thing, and for each further quarter of it."""
    told: dict[str, int] = {}

    def tell(what: str, done: float) -> None:
        quarter = int(done * 4)
        if told.get(what, -1) < quarter:
            told[what] = quarter
            say(f"… {what} {quarter * 25} %")

    return tell
