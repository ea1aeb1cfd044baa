"""One epoch of one batch: from the lines that are not done to the end, or to the moment when it has to stop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prelay_files.ledger import Ledger
from prelay_queue import failpoints
from prelay_queue.batches import BatchProgress, BatchStatus
from prelay_queue.errors import BadMessageError, QueueBusy, QueueError, QueueFull, QueueUnavailable
from prelay_queue.events import EndedEvent, LogView
from prelay_queue.job import JobSpec, Priority
from prelay_queue.scripts import NewJob
from prelay_text.batch_line import Refusal, refusal_line

from .answers import Answers
from .desk import AT_ONCE, Desk
from .ear import Ear
from .lease import RENEW_S, Lease
from .life import FAULT, Again, Answered, Late, Line, Refused, Verdict
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
#: How long a turn waits for something to happen, ms.
PATIENCE_MS = 50
#: A turn that only waits for answers takes at least so long, seconds: they are cheaper by the dozen.
PACE_S = 0.01
#: A job that was not heard of for so long is looked at, seconds: a lost event never holds a batch up.
SILENCE_S = 3.0
#: After an error nothing is asked of Redis for so long, seconds.
PAUSE_S = 0.2
#: Nothing is submitted for so long while as much of the class waits as may, seconds.
BUSY_S = 0.05
#: And to a Redis that is out of memory.
FULL_S = 0.5

CANCELLED = "batch_cancelled", "the batch was cancelled before this line was complete"
EXPIRED = "batch_expired", "the batch's completion window ended before this line was complete"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much a run holds at a time; see BatchConfig."""

    window: int
    lookahead: int
    max_tries: int


class Run:
    """Reads, submits, hears and writes, in turns of one thread. The ledger is the truth of what is done.

    Nothing is lost at any point: what was submitted is found again under the same ids, and what ended stays in the
    queue until its line is on disk, and the lease was still ours after that. `takes_over`: another run was before.
    """

    def __init__(
        self,
        lease: Lease,
        ledger: Ledger,
        desk: Desk,
        ear: Ear,
        reader: Reader,
        answers: Answers,
        sizes: Sizes,
        total: int,
        *,
        takes_over: bool,
    ) -> None:
        self._lease, self._ledger, self._desk, self._ear = lease, ledger, desk, ear
        self._reader, self._answers, self._max_tries = reader, answers, sizes.max_tries
        self._total = total
        self._lookahead = Lookahead(sizes.lookahead, LOOKAHEAD_BYTES)
        self._window = Window(sizes.window)
        self._outstanding = Outstanding(answers.batch_id)
        self._ended: list[str] = []  # jobs whose answer is to be read
        self._forgettable: list[str] = []  # jobs whose line is in the ledger
        self._unknown = sizes.window + sizes.lookahead if takes_over else 0  # lines that may be in the queue already
        self._unwanted: list[str] = []  # jobs that are to be cancelled
        self._why: tuple[str, str] | None = None  # nothing is run any more
        self._ends_at = 0.0  # the batch's deadline by this process's monotonic clock
        self._tick_at = 0.0
        self._hold_until = 0.0
        self._troubled = False
        self.outcome = BatchStatus.COMPLETED

    def __repr__(self) -> str:
        return f"Run({self._lease!r}, {self.progress}, {self._outstanding!r}, {self._window!r})"

    @property
    def progress(self) -> BatchProgress:
        ledger = self._ledger
        counted = ledger.completed, ledger.failed, ledger.prompt_tokens, ledger.completion_tokens
        return BatchProgress(self._total, *counted)

    @property
    def drained(self) -> bool:
        """Every line is in the ledger."""
        return self._reader.exhausted and not self._lookahead and not self._outstanding

    def until_drained(self, stopping: Callable[[], bool]) -> bool:
        """Take turns until all lines are in the ledger; False: we were told to stop. Raise LeaseLost, StorageFailed."""
        while not self.drained and not stopping():
            try:
                self._turn()
                self._troubled = False
            except QueueUnavailable as error:
                self._pause(error)
        self._checkpoint()
        return self.drained

    def forget(self) -> None:
        """Remove what the queue still has of lines that are on disk. Only while the lease is ours."""
        self._desk.forget(self._forgettable)
        self._forgettable.clear()

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
        moved = self._submit() + self._read()
        if not moved and heard < AT_ONCE:
            time.sleep(max(0.0, PACE_S - (time.monotonic() - began)))

    def _pause(self, error: QueueUnavailable) -> None:
        if not self._troubled:
            log.warning("%s: %s; it goes on when Redis answers", self._answers.batch_id, error)
        self._troubled = self._ear.lost = True
        time.sleep(PAUSE_S)

    # --- 1: what is told

    def _tick(self) -> None:
        """1 what is done is on disk, 2 and told; 3 only then it leaves the queue; 4 look for what was missed."""
        self._checkpoint()
        self._renew()
        self._tick_at = time.monotonic() + RENEW_S
        self.forget()
        self._desk.cancel(self._unwanted)
        self._unwanted.clear()
        self._ear.check()
        self._look(self._outstanding.silent(time.monotonic() - SILENCE_S))

    def _checkpoint(self) -> None:
        failpoints.hit("batch.checkpoint.before")
        self._ledger.checkpoint()
        failpoints.hit("batch.checkpoint.after")

    def _renew(self) -> None:
        kept = self._lease.keep(BatchStatus.IN_PROGRESS, self.progress)
        self._ends_at = time.monotonic() + kept.left_ms / 1000
        if self._why is None and kept.cancel:
            self._end_early(BatchStatus.CANCELLED, CANCELLED)
        elif self._why is None and kept.left_ms <= 0:
            self._end_early(BatchStatus.EXPIRED, EXPIRED)

    def _end_early(self, outcome: BatchStatus, why: tuple[str, str]) -> None:
        """Run nothing more: the lines that have not ended are told why."""
        log.info("%s: %s", self._answers.batch_id, why[1])
        self.outcome, self._why = outcome, why
        self._reader.run_no_more(*why)
        for line in self._lookahead.clear():
            self._refuse(line.number, Refusal(line.custom_id, *why), line)

    def _give_up(self) -> None:
        """End what is outstanding; what has ended by itself meanwhile counts."""
        assert self._why is not None
        jobs = list(self._outstanding)
        codes = self._desk.cancel(jobs)
        self._ended += [job for job, code in zip(jobs, codes, strict=True) if code == "done"]
        self._answer()
        for line in self._outstanding.lines():
            self._outstanding.drop(line)
            self._refuse(line.number, Refusal(line.custom_id, *self._why), line)

    # --- 2 and 3: what is heard of jobs

    def _hear(self) -> int:
        """Take in what came; wait for it where there is nothing else to do."""
        idle = self._outstanding and (self._reader.exhausted or not self._lookahead.has_room)
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
        line.await_all(self._answers.batch_id)
        if self._why is None:
            self._lookahead.put_back([line])
        else:
            self._refuse(line.number, Refusal(line.custom_id, *self._why), line)

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
            self._write_answer(line, verdict)
            return
        self._unwanted += self._outstanding.drop(line)  # its other choices
        match verdict:
            case Refused(refusal):
                self._refuse(line.number, refusal, line)
            case Late(refusal):
                over = self._why or (EXPIRED if self._is_late else None)
                self._refuse(line.number, Refusal(line.custom_id, *over) if over else refusal, line)
            case Again():
                line.begin_again()
                self._submit_again(line)

    def _write_answer(self, line: Line, verdict: Answered) -> None:
        try:
            raw, usage = self._answers.line(line, verdict.answers)
        except BadMessageError:
            log.exception("line %d cannot be shown", line.number)
            self._refuse(line.number, Refusal(line.custom_id, *FAULT), line)
            return
        failpoints.hit("batch.append.before")
        self._ledger.append(
            line.number,
            ok=True,
            raw=raw,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
        )
        failpoints.hit("batch.append.after")
        self._forgettable += line.over

    def _refuse(self, number: int, refusal: Refusal, line: Line | None = None) -> None:
        batch_id = self._answers.batch_id
        request_id = line.request_id(batch_id) if line else f"{batch_id}-{number}-0"
        self._ledger.append(number, ok=False, raw=refusal_line(batch_id, number, refusal, request_id))
        self._forgettable += line.over if line else ()

    @property
    def _is_late(self) -> bool:
        return 0 < self._ends_at <= time.monotonic()

    # --- 5: what is submitted

    def _submit(self) -> int:
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
        there: list[str] = []
        refused: list[Line] = []
        for line, answer in zip(lines, answers, strict=True):
            if isinstance(answer, QueueBusy | QueueFull):
                self._outstanding.drop(line)
                refused.append(line)
                self._hold_until = time.monotonic() + (BUSY_S if isinstance(answer, QueueBusy) else FULL_S)
            elif isinstance(answer, QueueError):
                log.error("line %d: %s", line.number, answer)
                self._unwanted += self._outstanding.drop(line)
                self._refuse(line.number, Refusal(line.custom_id, *FAULT), line)
            elif "exists" in answer:
                there += line.job_ids(self._answers.batch_id)
        self._lookahead.put_back(refused)
        self._desk.watch(there)
        self._look(there)

    def _jobs(self, line: Line) -> list[NewJob]:
        ends_at = self._ends_at
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
            for job, part in zip(line.job_ids(self._answers.batch_id), line.parts, strict=True)
        ]

    # --- 6: what is read

    def _read(self) -> int:
        """Read on, as long as there is room for lines; answers how many were looked at."""
        fresh: list[Line] = []
        count = size = 0
        while count < READ_AT_ONCE and size < READ_BYTES and self._lookahead.has_room and not self._reader.exhausted:
            count += 1
            found = next(self._reader, None)
            if isinstance(found, Unfit):
                self._refuse(found.number, found.refusal)
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
        batch_id = self._answers.batch_id
        try:
            known = self._desk.known([line.job_ids(batch_id)[0] for line in lines])
        except QueueError:
            known = [False] * len(lines)  # the submit will tell
        there: list[str] = []
        for line, is_known in zip(lines, known, strict=True):
            if is_known:
                self._outstanding.add(line)
                there += line.job_ids(batch_id)
            else:
                self._lookahead.add(line)
        self._desk.watch(there)
        self._look(there)
