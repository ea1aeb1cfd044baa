"""From the input to the queue: reads lines ahead, and submits as many of their jobs as there is room for."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from prelay_queue import failpoints
from prelay_queue.errors import QueueBusy, QueueError, QueueFull
from prelay_queue.job import JobSpec, Priority
from prelay_queue.scripts import NewJob
from prelay_text.batch_line import Refusal

from .book import Book
from .desk import AT_ONCE, Desk
from .life import FAULT, Line
from .order import Lookahead
from .outstanding import Outstanding
from .reading import Reader, Unfit
from .window import Window

log = logging.getLogger("prelay.batch")

#: Lines of the input that are read in one turn.
READ_AT_ONCE = 64
#: And bytes of good ones, so that a turn is short.
READ_BYTES = 2**20
#: Bytes of lines that are read ahead: their ids take some ten times as much.
LOOKAHEAD_BYTES = 4 * 2**20
#: Tokens of the prompts of all jobs that are outstanding.
MOST_TOKENS = 1_000_000
#: Nothing is submitted for so long while as much of the class waits as may, seconds.
BUSY_S = 0.05
#: And to a Redis that is out of memory.
FULL_S = 0.5


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much a run holds at a time; see BatchConfig."""

    window: int
    lookahead: int
    max_tries: int


class Intake:
    """Every line that it has read is in the lookahead, outstanding, or in the book, before Redis is asked again.

    `there` are jobs that it found in the queue: they are outstanding, and are to be watched and looked at. `unwanted`
    are those that are to be cancelled. `takes_over`: another run was before.
    """

    def __init__(
        self, desk: Desk, reader: Reader, outstanding: Outstanding, book: Book, sizes: Sizes, *, takes_over: bool
    ) -> None:
        self.ends_at = 0.0  # the batch's deadline by this process's monotonic clock
        self.there: list[str] = []
        self.unwanted: dict[str, Line] = {}
        self._desk, self._reader, self._outstanding, self._book = desk, reader, outstanding, book
        self._lookahead = Lookahead(sizes.lookahead, LOOKAHEAD_BYTES)
        self._window = Window(sizes.window)
        self._unknown = sizes.window + sizes.lookahead if takes_over else 0  # lines that may be in the queue already
        self._hold_until = 0.0

    def __repr__(self) -> str:
        return f"Intake({len(self._lookahead)} lines ahead, {self._window!r})"

    @property
    def exhausted(self) -> bool:
        """Every line of the input is outstanding, or in the book."""
        return self._reader.exhausted and not self._lookahead

    @property
    def idle(self) -> bool:
        """There is nothing to read, or no room for it."""
        return self._reader.exhausted or not self._lookahead.has_room

    def put_back(self, line: Line) -> None:
        """It is to be submitted again, before all others."""
        self._lookahead.put_back([line])

    def close(self, code: str, message: str) -> list[Line]:
        """Submit nothing more, and refuse for this reason what is read from now on; what was read ahead."""
        self._reader.run_no_more(code, message)
        return self._lookahead.clear()

    # --- what is submitted

    def submit(self) -> int:
        """Submit as much as there is room for; answers how many jobs."""
        if not self._lookahead or time.monotonic() < self._hold_until:
            return 0
        backlog = self._desk.backlog()
        self._window.see(backlog, time.monotonic())
        room = self._window.room(len(self._outstanding), backlog.waiting)
        submitted = 0
        while submitted < room and (lines := self._next_lines(room - submitted)):
            self._send(lines)
            submitted += sum(len(line.parts) for line in lines)
        return submitted

    def _next_lines(self, room: int) -> list[Line]:
        """The next lines, whose jobs fill the room, or exceed it with the last; they count as outstanding from now."""
        lines: list[Line] = []
        while room > 0 and len(lines) < AT_ONCE and time.monotonic() >= self._hold_until:
            if self._outstanding and self._outstanding.tokens > MOST_TOKENS:
                break
            line = self._lookahead.next()
            if line is None:
                break
            line.looked = time.monotonic()
            self._outstanding.add(line)
            lines.append(line)
            room -= len(line.parts)
        return lines

    def _send(self, lines: Sequence[Line]) -> None:
        failpoints.hit("batch.submit.before")
        answers = self._desk.submit([self._jobs(line) for line in lines])
        failpoints.hit("batch.submit.after")
        refused: list[Line] = []
        for line, answer in zip(lines, answers, strict=True):
            if isinstance(answer, QueueBusy | QueueFull):
                self._outstanding.drop(line)
                refused.append(line)
                self._hold_until = time.monotonic() + (BUSY_S if isinstance(answer, QueueBusy) else FULL_S)
            elif isinstance(answer, QueueError):
                log.error("line %d: %s", line.number, answer)
                self.unwanted |= dict.fromkeys(self._outstanding.drop(line), line)
                self._book.refuse(line.number, Refusal(line.custom_id, *FAULT), line)
            elif "exists" in answer:
                self.there += line.job_ids(self._book.batch_id)
        self._lookahead.put_back(refused)

    def _jobs(self, line: Line) -> list[NewJob]:
        ends_at = self.ends_at
        if line.request.deadline_ms is not None:
            own = time.monotonic() + line.request.deadline_ms / 1000
            ends_at = min(own, ends_at or own)
        return [
            NewJob(
                JobSpec(job, part.prompt_ids, part.sampling, Priority.BATCH),
                self._desk.attachment,
                len(line.parts),
                ends_at,
            )
            for job, part in zip(line.job_ids(self._book.batch_id), line.parts, strict=True)
        ]

    # --- what is read

    def read(self) -> int:
        """Read on, as long as there is room for lines; answers how many were looked at."""
        fresh: list[Line] = []
        count = size = 0
        while count < READ_AT_ONCE and size < READ_BYTES and self._lookahead.has_room and not self._reader.exhausted:
            count += 1
            found = next(self._reader, None)
            if isinstance(found, Unfit):
                self._book.refuse(found.number, found.refusal)
            elif found is not None:
                fresh.append(found)
                size += found.size
                if not self._unknown:
                    self._lookahead.add(found)
        if self._unknown:
            self._recognise(fresh)
        return count

    def _recognise(self, lines: Sequence[Line]) -> None:
        """Some of these an earlier run has submitted: watch those again before anybody gives them up."""
        self._unknown = max(0, self._unknown - len(lines))
        batch_id = self._book.batch_id
        try:
            known = self._desk.known([line.job_ids(batch_id)[0] for line in lines])
        except QueueError:
            known = [False] * len(lines)  # the submit will tell
        for line, is_known in zip(lines, known, strict=True):
            if is_known:
                self._outstanding.add(line)
                self.there += line.job_ids(batch_id)
            else:
                self._lookahead.add(line)
