"""One epoch of one batch: from the lines that are not done to the end, or to the moment when it has to stop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from prelay_queue.batches import BatchStatus
from prelay_queue.errors import QueueUnavailable
from prelay_queue.events import EndedEvent, LogView
from prelay_text.batch_line import Refusal

from .book import Book
from .desk import AT_ONCE, Desk
from .ear import Ear
from .intake import Intake, Sizes
from .lease import RENEW_S, Lease
from .life import Again, Answered, Late, Line, Refused, Verdict
from .outstanding import Outstanding
from .reading import Reader

log = logging.getLogger("prelay.batch")

#: How long a turn waits for something to happen, ms.
PATIENCE_MS = 50
#: A turn that only waits for answers takes at least so long, seconds: they are cheaper by the dozen.
PACE_S = 0.01
#: A job that was not heard of for so long is looked at, seconds: a lost event never holds a batch up.
SILENCE_S = 3.0
#: After an error nothing is asked of Redis for so long, seconds.
PAUSE_S = 0.2

CANCELLED = "batch_cancelled", "the batch was cancelled before this line was complete"
EXPIRED = "batch_expired", "the batch's completion window ended before this line was complete"


class Run:
    """Reads, submits, hears and writes, in turns of one thread. The ledger is the truth of what is done.

    Nothing is lost at any point: what was submitted is found again under the same ids, and what ended stays in the
    queue until its line is on disk, and the lease was still ours after that. `takes_over`: another run was before.
    """

    def __init__(
        self, lease: Lease, book: Book, desk: Desk, ear: Ear, reader: Reader, sizes: Sizes, *, takes_over: bool
    ) -> None:
        self._lease, self._book, self._desk, self._ear = lease, book, desk, ear
        self._max_tries = sizes.max_tries
        self._outstanding = Outstanding(book.batch_id)
        self._intake = Intake(desk, reader, self._outstanding, book, sizes, takes_over=takes_over)
        self._ended: list[str] = []  # jobs whose answer is to be read
        self._why: tuple[str, str] | None = None  # nothing is run any more
        self._tick_at = 0.0
        self._troubled = False
        self.outcome = BatchStatus.COMPLETED

    def __repr__(self) -> str:
        return f"Run({self._lease!r}, {self._book.progress}, {self._outstanding!r}, {self._intake!r})"

    @property
    def drained(self) -> bool:
        """Every line is in the ledger."""
        return self._intake.exhausted and not self._outstanding

    def until_drained(self, stopping: Callable[[], bool]) -> bool:
        """Take turns until all lines are in the ledger; False: we were told to stop. Raise LeaseLost, StorageFailed."""
        while not self.drained and not stopping():
            try:
                self._turn()
                self._troubled = False
            except QueueUnavailable as error:
                self._pause(error)
        self._book.checkpoint()
        return self.drained

    def forget(self) -> None:
        """Cancel what is not wanted any more, and remove what the queue still has of lines that are on disk.

        Only while the lease is ours.
        """
        self._cancel_unwanted()
        self._desk.forget(self._book.forgettable)
        self._book.forgettable.clear()

    def _turn(self) -> None:
        """1 renew, 2 hear, 3 look where events may be lost, 4 write what ended, 5 submit, 6 read on.

        What Redis is asked may fail at any point, and no line may be lost by it: a line is in the lookahead, or
        outstanding, or in the ledger, before the next question.
        """
        began = time.monotonic()
        if began >= self._tick_at:
            self._tick()
        heard = self._hear()
        if self._ear.lost:
            self._look_again()
        self._answer()
        if self._why is not None:
            self._give_up()
        moved = self._intake.submit() + self._intake.read()
        self._meet()
        if not moved and heard < AT_ONCE:
            time.sleep(max(0.0, PACE_S - (time.monotonic() - began)))

    def _pause(self, error: QueueUnavailable) -> None:
        if not self._troubled:
            log.warning("%s: %s; it goes on when Redis answers", self._book.batch_id, error)
        self._troubled = self._ear.lost = True
        time.sleep(PAUSE_S)

    # --- 1: what is told

    def _tick(self) -> None:
        """1 what is done is on disk, 2 and told; 3 only then it leaves the queue; 4 look for what was missed."""
        self._book.checkpoint()
        self._renew()
        self._tick_at = time.monotonic() + RENEW_S
        self.forget()
        self._ear.check()
        self._look(self._outstanding.silent(time.monotonic() - SILENCE_S))

    def _cancel_unwanted(self) -> None:
        jobs = list(self._intake.unwanted)
        for job, code in zip(jobs, self._desk.cancel(jobs), strict=True):
            line = self._intake.unwanted.pop(job)
            if code != "watched":  # else it runs on, for somebody else
                self._book.over(line, [job])

    def _renew(self) -> None:
        kept = self._lease.keep(BatchStatus.IN_PROGRESS, self._book.progress)
        self._intake.ends_at = time.monotonic() + kept.left_ms / 1000
        if self._why is None and kept.cancel:
            self._end_early(BatchStatus.CANCELLED, CANCELLED)
        elif self._why is None and kept.left_ms <= 0:
            self._end_early(BatchStatus.EXPIRED, EXPIRED)

    def _end_early(self, outcome: BatchStatus, why: tuple[str, str]) -> None:
        """Run nothing more: the lines that have not ended are told why."""
        log.info("%s: %s", self._book.batch_id, why[1])
        self.outcome, self._why = outcome, why
        for line in self._intake.close(*why):
            self._book.refuse(line.number, Refusal(line.custom_id, *why), line)

    def _give_up(self) -> None:
        """End what is outstanding; what has ended by itself meanwhile counts."""
        assert self._why is not None
        jobs = list(self._outstanding)
        codes = self._desk.cancel(jobs)
        self._ended += [job for job, code in zip(jobs, codes, strict=True) if code == "done"]
        self._answer()
        left = {job for job, code in zip(jobs, codes, strict=True) if code != "watched"}
        for line in self._outstanding.lines():
            self._book.over(line, left.intersection(self._outstanding.drop(line)))
            self._book.refuse(line.number, Refusal(line.custom_id, *self._why), line)

    # --- 2 and 3: what is heard of jobs

    def _hear(self) -> int:
        """Take in what came; wait for it where there is nothing else to do."""
        idle = self._outstanding and self._intake.idle
        events = self._ear.listen(PATIENCE_MS if idle and not self._ended else 0)
        preempted = []
        for event in events:
            if event.job not in self._outstanding:
                continue
            self._outstanding.of(event.job)[0].looked = time.monotonic()
            if isinstance(event, EndedEvent):
                self._ended.append(event.job)
            else:
                preempted.append((event.job, event.epoch))
        self._desk.requeue(preempted)
        return len(events)

    def _look_again(self) -> None:
        """Events may have been lost, and submits: watch all jobs, once more perhaps, and look where they are."""
        jobs = list(self._outstanding)
        self._desk.watch(jobs)
        self._look(jobs)
        self._ear.lost = False

    def _meet(self) -> None:
        """Hear of the jobs that were in the queue already, and look where they are."""
        jobs = self._intake.there
        self._intake.there = []
        self._desk.watch(jobs)
        self._look(jobs)

    def _look(self, jobs: Sequence[str]) -> None:
        """Where are these? One that Redis does not know is submitted again."""
        preempted = []
        for job, (state, epoch) in zip(jobs, self._desk.states(jobs), strict=True):
            if job not in self._outstanding:
                continue
            line, _ = self._outstanding.of(job)
            line.looked = time.monotonic()
            if not state:
                self._submit_again(line)
            elif state == "done":
                self._ended.append(job)
            elif state == "preempted":
                preempted.append((job, epoch))
        self._desk.requeue(preempted)

    def _submit_again(self, line: Line) -> None:
        """The same try, of which Redis lost a job, or the next. Whichever of its jobs are there are found again."""
        self._outstanding.drop(line)
        line.await_all(self._book.batch_id)
        if self._why is None:
            self._intake.put_back(line)
        else:
            self._book.refuse(line.number, Refusal(line.custom_id, *self._why), line)

    # --- 4: what becomes of lines

    def _answer(self) -> None:
        """Read the answers of jobs that ended, and write the lines that they complete."""
        jobs = list(dict.fromkeys(job for job in self._ended if job in self._outstanding))
        for job, view in zip(jobs, self._desk.views(jobs), strict=True):
            if job in self._outstanding:
                self._take(job, view)
        self._ended.clear()

    def _take(self, job: str, view: LogView | None) -> None:
        line, choice = self._outstanding.of(job)
        if view is None:
            self._submit_again(line)
        elif view.state == "done":
            self._outstanding.over(job)
            line.over.append(job)
            verdict = line.on_end(choice, view, self._max_tries)
            if verdict is not None:
                self._obey(line, verdict)

    def _obey(self, line: Line, verdict: Verdict) -> None:
        if isinstance(verdict, Answered):
            self._book.answer(line, verdict)
            return
        self._intake.unwanted |= dict.fromkeys(self._outstanding.drop(line), line)  # its other choices
        match verdict:
            case Refused(refusal):
                self._book.refuse(line.number, refusal, line)
            case Late(refusal):
                over = self._why or (EXPIRED if self._is_late else None)
                self._book.refuse(line.number, Refusal(line.custom_id, *over) if over else refusal, line)
            case Again():
                line.begin_again()
                self._submit_again(line)

    @property
    def _is_late(self) -> bool:
        return 0 < self._intake.ends_at <= time.monotonic()
