"""What becomes of the lines of one batch, written down: each once, and which jobs the queue may forget then."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from prelay_files.ledger import Ledger
from prelay_queue import failpoints
from prelay_queue.batches import BatchProgress
from prelay_queue.errors import BadMessageError
from prelay_text.batch_line import Refusal, refusal_line

from .answers import Answers
from .life import FAULT, Answered, Line

log = logging.getLogger("prelay.batch")


class Book:
    """The ledger, in the words of lines. Raises StorageFailed."""

    def __init__(self, ledger: Ledger, answers: Answers, total: int) -> None:
        """`total`: lines of the input."""
        self.batch_id = answers.batch_id
        self.forgettable: list[str] = []  # jobs whose line is in the ledger, though not yet on disk for good
        self._ledger, self._answers, self._total = ledger, answers, total

    @property
    def progress(self) -> BatchProgress:
        ledger = self._ledger
        counted = ledger.completed, ledger.failed, ledger.prompt_tokens, ledger.completion_tokens
        return BatchProgress(self._total, *counted)

    def answer(self, line: Line, verdict: Answered) -> None:
        try:
            raw, usage = self._answers.line(line, verdict.answers)
        except BadMessageError:
            log.exception("line %d cannot be shown", line.number)
            self.refuse(line.number, Refusal(line.custom_id, *FAULT), line)
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
        self.forgettable += line.over

    def refuse(self, number: int, refusal: Refusal, line: Line | None = None) -> None:
        """A line that has no answer; `line` is set if it was to be run."""
        request_id = line.request_id(self.batch_id) if line else f"{self.batch_id}-{number}-0"
        self._ledger.append(number, ok=False, raw=refusal_line(self.batch_id, number, refusal, request_id))
        self.forgettable += line.over if line else ()

    def over(self, line: Line, jobs: Iterable[str]) -> None:
        """These jobs of a line have ended, and are to be forgotten with it."""
        (self.forgettable if line.number in self._ledger.done else line.over).extend(jobs)

    def checkpoint(self) -> None:
        """Make all that was written last."""
        failpoints.hit("batch.checkpoint.before")
        self._ledger.checkpoint()
        failpoints.hit("batch.checkpoint.after")
