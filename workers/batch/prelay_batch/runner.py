"""A batch from the lease to its end, as often as it takes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import TypeVar

import orjson

from prelay_files.errors import FileMissing
from prelay_files.folder import BatchFolder
from prelay_files.ledger import Ledger
from prelay_files.record import BatchRecord
from prelay_files.store import FileStore
from prelay_queue import failpoints
from prelay_queue.batch_end import end_of
from prelay_queue.batches import BatchProgress, BatchScripts, BatchStatus, Taken
from prelay_queue.client import SyncQueue
from prelay_queue.errors import QueueUnavailable
from prelay_text.batch_line import ENDPOINTS
from prelay_text.tokenizer import Tokenizer

from .answers import Answers
from .book import Book
from .config import BatchConfig
from .desk import Desk
from .ear import Ear
from .errors import LeaseLost
from .fleet import FleetLimits
from .intake import Sizes
from .lease import RENEW_S, Lease, take
from .reading import Ask, Reader
from .run import PAUSE_S, Run
from .source import lines_of

log = logging.getLogger("prelay.batch")

T = TypeVar("T")


class Outcome(StrEnum):
    """What a runner leaves."""

    OVER = "over"  # the batch has ended
    HELD = "held"  # another runs it
    STOPPED = "stopped"  # we were told to stop: the batch is to go on elsewhere


class _Stopped(Exception):  # noqa: N818
    """We were told to stop while Redis did not answer."""


class _Invalid(Exception):  # noqa: N818
    """The file as a whole cannot be run."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.errors = orjson.dumps([{"code": code, "message": message, "param": None, "line": None}]).decode()


class Runner:
    """Runs one batch. Wherever it is killed, the next runner goes on with what is on disk and in the queue."""

    def __init__(
        self,
        config: BatchConfig,
        tokenizer: Tokenizer,
        system_fingerprint: str,
        batch_id: str,
        stopping: Callable[[], bool],
    ) -> None:
        self._config, self._tokenizer, self._fingerprint = config, tokenizer, system_fingerprint
        self._batch_id, self._stopping = batch_id, stopping
        self._queue = SyncQueue(config.queue)
        self._scripts = BatchScripts(self._queue.keys)
        self._store = FileStore(config.files_dir)
        self._folder = BatchFolder(config.files_dir, batch_id)

    def __repr__(self) -> str:
        return f"Runner({self._batch_id})"

    def run(self) -> Outcome:
        """Run it to its end, or until it is not ours any more, or we are told to stop. Raise StorageFailed."""
        try:
            record = self._folder.record()
            while self._folder.end() is None:
                outcome = self._run_once(record)
                if outcome is not None:
                    return outcome
            return Outcome.OVER
        except _Stopped:
            return Outcome.STOPPED
        finally:
            self._queue.close()

    def _run_once(self, record: BatchRecord) -> Outcome | None:
        """One epoch; None: Redis has lost the batch, and it is to be taken up again."""
        ear = Ear(self._queue)
        taken = self._taken(record, ear.id)
        if taken.code == "held":
            return Outcome.STOPPED if self._stopping() else Outcome.HELD
        if taken.code == "over":
            self._insist(self._note_end)
            return Outcome.OVER
        lease = Lease(self._queue, self._batch_id, taken.epoch, ear.id, self._config.lease_ms)
        log.info("%s: epoch %d begins", self._batch_id, taken.epoch)
        try:
            with Ledger.take_over(self._folder, taken.epoch) as ledger:
                return self._run_epoch(record, lease, ledger, ear)
        except LeaseLost as lost:
            log.warning("%s: %s", self._batch_id, lost)
            return {"gone": None, "over": Outcome.OVER}.get(lost.code, Outcome.HELD)

    def _run_epoch(self, record: BatchRecord, lease: Lease, ledger: Ledger, ear: Ear) -> Outcome:
        """1 count the lines, 2 run them, 3 make the files, 4 end the batch, 5 note that on disk."""
        try:
            total = self._count(record, lease, ledger)
        except _Invalid as invalid:
            return self._fail(lease, ledger, invalid.errors)
        limits = FleetLimits(self._queue, self._tokenizer.context_len)
        with self._store.open(record.input_file_id) as file:
            ask = Ask(self._batch_id, record.endpoint, self._config.served_model_name, self._tokenizer, limits)
            reader = Reader(ask, file, total, ledger.done)
            answers = Answers(self._batch_id, self._tokenizer, self._config.served_model_name, self._fingerprint)
            sizes = Sizes(self._config.window, self._config.lookahead, self._config.max_tries)
            desk = Desk(self._queue, ear.attachment)
            book = Book(ledger, answers, total)
            run = Run(lease, book, desk, ear, reader, sizes, takes_over=lease.epoch > 1)
            drained = run.until_drained(self._stopping)
        if not drained:
            lease.give_back(BatchStatus.IN_PROGRESS, book.progress)
            ear.close(jobs_left=True)
            return Outcome.STOPPED
        self._insist(partial(lease.keep, BatchStatus.FINALIZING, book.progress))
        self._insist(run.forget)
        ear.close(jobs_left=False)
        failpoints.hit("batch.assemble.before")
        with lease.kept_meanwhile(BatchStatus.FINALIZING, book.progress):
            output_file, error_file = ledger.assemble(self._store)
        failpoints.hit("batch.assemble.after")
        self._end(lease, run.outcome, book.progress, output_file or "", error_file or "", "")
        return Outcome.OVER

    def _fail(self, lease: Lease, ledger: Ledger, errors: str) -> Outcome:
        """End it as failed, with what earlier runs have answered."""
        counted = ledger.completed, ledger.failed, ledger.prompt_tokens, ledger.completion_tokens
        progress = BatchProgress(ledger.completed + ledger.failed, *counted)
        with lease.kept_meanwhile(BatchStatus.VALIDATING, progress):
            output_file, error_file = ledger.assemble(self._store)
        self._end(lease, BatchStatus.FAILED, progress, output_file or "", error_file or "", errors)
        return Outcome.OVER

    def _taken(self, record: BatchRecord, owner: str) -> Taken:
        """The right to run it. What Redis has lost is opened again with what the disk has."""
        while True:
            floor = max(self._folder.epochs(), default=0)
            lease_ms = self._config.lease_ms
            taken = self._insist(partial(take, self._queue, self._batch_id, owner, lease_ms, floor, self._stopping))
            if taken.code != "gone":
                if taken.code == "ok" and self._folder.cancel_asked():  # a Redis that lost data may not know it
                    self._insist(partial(self._queue.run, self._scripts.cancel(self._batch_id)))
                return taken
            left_ms = record.expires_at * 1000 - time.time_ns() // 1_000_000
            call = self._scripts.open(self._batch_id, record.encode(), left_ms, floor)
            self._insist(partial(self._queue.run, call))

    def _count(self, record: BatchRecord, lease: Lease, ledger: Ledger) -> int:
        """The lines of the file. Raise _Invalid where there is nothing that could be run."""
        if record.endpoint not in ENDPOINTS:
            message = f"endpoint must be one of {', '.join(ENDPOINTS)}, not {record.endpoint[:100]!r}"
            raise _Invalid("invalid_endpoint", message)
        total, told_at = 0, time.monotonic()
        try:
            with self._store.open(record.input_file_id) as file:
                for _ in lines_of(file):
                    total += 1
                    if total % 1024 == 0 and time.monotonic() > told_at + RENEW_S:
                        counted = ledger.completed, ledger.failed, ledger.prompt_tokens, ledger.completion_tokens
                        progress = BatchProgress(total, *counted)
                        self._insist(partial(lease.keep, BatchStatus.VALIDATING, progress))
                        told_at = time.monotonic()
        except FileMissing:
            raise _Invalid("file_not_found", f"the input file {record.input_file_id} is not there any more") from None
        if not total:
            raise _Invalid("empty_file", f"the input file {record.input_file_id} has no line that is not blank")
        return total

    def _end(
        self, lease: Lease, status: BatchStatus, progress: BatchProgress, output: str, error: str, errors: str
    ) -> None:
        self._insist(partial(lease.end, status, progress, output, error, errors))
        log.info("%s: %s, %d lines answered, %d refused", self._batch_id, status, progress.completed, progress.failed)
        self._insist(self._note_end)

    def _note_end(self) -> None:
        """What Redis has of the end, the disk keeps."""
        state = self._queue.run(self._scripts.look(self._batch_id))
        if state is not None and state.status.over:
            self._folder.write_end(end_of(state))

    def _insist(self, work: Callable[[], T]) -> T:
        """Do it, and again until Redis answers. Raise _Stopped when we are told to stop before."""
        while True:
            try:
                return work()
            except QueueUnavailable as error:
                if self._stopping():
                    raise _Stopped from None
                log.warning("%s: %s", self._batch_id, error)
                time.sleep(PAUSE_S)
