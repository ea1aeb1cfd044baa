"""`prelay batch run`: from a file of lines to a file of answers, whatever happens in between."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ChildFailed, CliError, Refused
from ..host import size
from ..report import Report
from .batch import Batch
from .course import Course, Wish, choose
from .download import check_output, download, errors_path
from .end import tell_end
from .note import Note, Notebook
from .ownserver import CHILD, OwnServer, own_server
from .patience import Patience
from .server import RUN, BatchServer
from .source import Ready, Source, ready
from .watch import transfer, watch

URL = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class Target:
    """Where the server is: a URL, or one of our own with these arguments. No URL: the note's, else the usual one."""

    url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    serve: bool = False
    arguments: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """One `prelay batch run`. No source: go on with what the note says."""

    wish: Wish
    source: Source | None
    target: Target
    window: str = "24h"
    ordered: bool = False
    cancel_on_interrupt: bool = False

    @property
    def output(self) -> Path:
        return self.wish.output

    def resume_command(self) -> str:
        """Return the words that go on with it. The note knows the input and the server."""
        words = ["prelay", "batch", "run", "-o", str(self.output), "--resume"]
        words += ["--ordered"] if self.ordered else []
        words += ["--serve"] if self.target.serve else []
        words += ["--", *self.target.arguments] if self.target.arguments else []
        return shlex.join(words)


class Run:
    """What a run has: its note, and once it is needed, a server."""

    def __init__(self, plan: Plan, notebook: Notebook, report: Report, stack: ExitStack) -> None:
        self.plan, self.notebook, self.report = plan, notebook, report
        self._stack = stack
        self._server: BatchServer | None = None

    def server(self) -> BatchServer:
        """Return the server, started if it is our own."""
        if self._server is None:
            target = self.plan.target
            own: OwnServer | None = None
            if target.serve:
                own = self._start(target.arguments)
                url = own.url
            else:
                url = target.url or (self.notebook.note.url if self.notebook.note else URL)
            check = own.check if own else lambda: None
            patience = Patience(url, self.report.warn, check=check)
            patience.has_answered = own is not None
            self._server = BatchServer(url, target.api_key, patience)
            self._stack.callback(self._server.close)
        return self._server

    def _start(self, arguments: Sequence[str]) -> OwnServer:
        begun, report = time.monotonic(), self.report

        def tell(line: str) -> None:
            if CHILD not in line:  # what its parts say is for when it fails
                report.waiting(f"prelay serve: {line.removeprefix('… ')}")

        report.waiting("starting prelay serve")
        self._stack.callback(report.settled)
        try:
            own = self._stack.enter_context(own_server(arguments, tell))
        finally:
            report.settled()
        self.report.step(f"a server of its own on {own.url} after {time.monotonic() - begun:.1f} s")
        return own

    def begin(self, lines: Ready) -> Batch:
        """Upload and create. A note of the run is left before the server can hear of it."""
        server, report = self.server(), self.report
        begun = time.monotonic()
        with transfer(report) as tell:
            file_id = server.upload(lines.file, lines.name, lambda sent: tell("uploading", sent, lines.bytes))
        report.step(
            f"uploaded {lines.name}: {lines.count:,} lines, {size(lines.bytes)}, in {time.monotonic() - begun:.1f} s"
        )
        note = self.notebook.note
        if note is None or self.plan.wish.fresh:
            note = Note.new(lines.digest, lines.name, server.url)
        # An earlier run may have asked for the batch and died before it heard of it.
        note = self.notebook.write(note, url=server.url, batch="", over=False)
        metadata = {RUN: note.run, "input": lines.name[:512]}
        batch = server.create(file_id, lines.endpoint, self.plan.window, metadata)
        self.notebook.write(note, batch=batch.id)
        report.step(f"{batch.id} runs on {server.url}")
        return batch

    def follow(self, batch_id: str) -> int:
        """Watch a batch to its end, and write its files. Return the exit code, 130 where an interrupt left it."""
        server = self.server()
        begun = time.monotonic()
        try:
            batch = self._until_over(server, batch_id)
            with transfer(self.report) as tell:
                errors = download(server, batch, self.plan.output, self.plan.ordered, tell)
        except KeyboardInterrupt:
            self._say_how_to_go_on(batch_id)
            return 130
        except ChildFailed:
            self._say_how_to_go_on(batch_id)
            raise
        except Refused as error:
            if error.status != 404:
                raise
            raise CliError(
                f"{server.url} does not have {batch_id} or its files: {error}; --fresh begins anew"
            ) from None
        note = self.notebook.note
        assert note is not None
        self.notebook.write(note, over=True, status=batch.status, completed=batch.completed, failed=batch.failed)
        tell_end(self.report, batch, self.plan.output, errors, time.monotonic() - begun)
        return batch.exit_code

    def _until_over(self, server: BatchServer, batch_id: str) -> Batch:
        try:
            return watch(server, batch_id, self.report)
        except KeyboardInterrupt:
            if not self.plan.cancel_on_interrupt:
                raise
        try:
            status = server.cancel(batch_id).status
            self.report.warn(f"{batch_id} is {status}; what it has is fetched at its end. Ctrl-C again does not wait")
        except Refused as error:
            if error.status != 409:  # it came to its end just now
                raise
        return watch(server, batch_id, self.report)

    def _say_how_to_go_on(self, batch_id: str) -> None:
        own = self.plan.target.serve
        where = (
            "waits in the state directory until a server runs there again" if own else "goes on without this command"
        )
        self.report.warn(f"{batch_id} {where}")
        self.report.say(f"  fetch it later:  {self.plan.resume_command()}")
        if not own:
            url = self.server().url
            at = "" if url == URL else f" --url {shlex.quote(url)}"
            self.report.say(f"  end it:          prelay batch cancel {batch_id}{at}")


def run(plan: Plan, report: Report) -> int:
    """Return 0 when every line has its answer, 1 when some have none, 3 when the batch did not complete, 130 when left.

    1 Take the output's note. 2 Read the input. 3 Decide by both. 4 Upload and create, or find what there is.
    5 Watch. 6 Write the files, then into the note that it is over.
    """
    check_output(plan.output)
    with _notebook(plan.output) as notebook, ExitStack() as stack:
        course = Run(plan, notebook, report, stack)
        lines = stack.enter_context(_read(plan, course))
        note = notebook.note
        match choose(plan.wish, note, lines.digest if lines else None):
            case Course.OVER:
                assert note is not None
                return _tell_over(report, note, plan.output)
            case Course.GO_ON:
                assert note is not None
                return course.follow(_go_on(course, note, lines))
            case Course.BEGIN:
                assert lines is not None
                if note is not None:
                    _leave(report, note, plan.output)
                return course.follow(course.begin(lines).id)


def _leave(report: Report, note: Note, output: Path) -> None:
    """Begin anew where an earlier run was: its errors would look like those of this one."""
    if note.batch and not note.over:
        report.warn(f"{note.batch}, which an earlier run began, is left as it is")
    errors_path(output).unlink(missing_ok=True)


def _go_on(course: Run, note: Note, lines: Ready | None) -> str:
    """Return the id of the batch of an earlier run; begin it where that run did not come so far."""
    if note.batch:
        course.report.step(f"goes on with {note.batch} of an earlier run (--fresh begins anew)")
        return note.batch
    if (found := course.server().find(note.run)) is None:
        assert lines is not None  # choose saw to it
        return course.begin(lines).id
    course.notebook.write(note, batch=found.id)
    course.report.step(f"goes on with {found.id} of an earlier run (--fresh begins anew)")
    return found.id


@contextmanager
def _notebook(output: Path) -> Iterator[Notebook]:
    notebook = Notebook(output)
    try:
        yield notebook
    finally:
        notebook.close()


@contextmanager
def _read(plan: Plan, course: Run) -> Iterator[Ready | None]:
    if plan.source is None:
        yield None
        return
    with ready(plan.source, lambda: course.server().first_model()) as lines:
        yield lines


def _tell_over(report: Report, note: Note, output: Path) -> int:
    report.step(f"{output} is the output of {note.input} already: {note.batch} is {note.status} (--fresh begins anew)")
    return Batch(note.batch, note.status, completed=note.completed, failed=note.failed).exit_code
