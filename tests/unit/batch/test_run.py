"""A run against a queue that fails at any call, forgets, refuses and preempts: no line is lost or answered twice."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from prelay_batch import intake
from prelay_batch import run as run_module
from prelay_batch.answers import Answers
from prelay_batch.book import Book
from prelay_batch.errors import LeaseLost
from prelay_batch.intake import Sizes
from prelay_batch.reading import Ask, Reader
from prelay_batch.run import Run
from prelay_batch.window import Backlog
from prelay_files.bitmap import Bitmap
from prelay_files.folder import BatchFolder
from prelay_files.ids import new_batch_id
from prelay_files.ledger import Ledger
from prelay_files.record import BatchRecord
from prelay_files.store import FileStore
from prelay_queue.batches import BatchProgress, BatchStatus, Kept
from prelay_queue.errors import QueueBusy, QueueError, QueueFull, QueueUnavailable
from prelay_queue.events import EndedEvent, LogView, PreemptedEvent
from prelay_queue.scripts import NewJob
from prelay_text.resolve import Limits
from prelay_text.tokenizer import Tokenizer
from tests.bed.batch import COMPLETIONS, jsonl, line
from tests.bed.tokenizer import make_tokenizer

FAULT = orjson.dumps({"message": "no", "status": 500}).decode()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_tokenizer(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAUSE_S", "PACE_S", "RENEW_S", "SILENCE_S"):
        monkeypatch.setattr(run_module, name, 0.0)
    for name in ("BUSY_S", "FULL_S"):
        monkeypatch.setattr(intake, name, 0.0)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # nobody pulls the plug here


class FakeQueue:
    """Desk, ear and lease in one, over jobs in memory. Any question may fail, before it has an effect or after."""

    attachment = "~me#1"

    def __init__(self, seed: int, trouble: float) -> None:
        self.chance = random.Random(seed)
        self.trouble = trouble
        self.jobs: dict[str, str] = {}  # job to its state: queued, preempted, or how it ended
        self.events: list[EndedEvent | PreemptedEvent] = []
        self.lost = True
        self.cancel_at = self.chance.choice([10**9, 10**9, 30])
        self.lease_lost_at = 10**9
        self.asked = 0
        self.answered = Bitmap()

    def _ask(self) -> None:
        self.asked += 1
        if self.chance.random() < self.trouble:
            raise QueueUnavailable("away")

    def live(self) -> None:
        """Jobs end, are preempted and are forgotten; of some of it nobody hears."""
        for job, state in list(self.jobs.items()):
            fate = self.chance.random()
            if state in ("queued", "preempted") and fate < 0.3:
                reason = self.chance.choices(["length", "stop", "cancelled", "error"], [6, 2, 1, 1])[0]
                self.jobs[job] = reason
                self._tell(EndedEvent(job, 1, 1, reason))
            elif state == "queued" and fate < 0.4:
                self.jobs[job] = "preempted"
                self._tell(PreemptedEvent(job, 1, "test"))
            elif fate > 1 - self.trouble / 5:
                del self.jobs[job]

    def _tell(self, event: EndedEvent | PreemptedEvent) -> None:
        self.events += [event] * self.chance.choice([0, 1, 1, 1, 2])

    # The ear.

    def listen(self, block_ms: int) -> list[EndedEvent | PreemptedEvent]:
        self.live()
        self._ask()
        events, self.events = self.events, []
        self.chance.shuffle(events)
        return events

    def check(self) -> None:
        self._ask()

    # The desk.

    def submit(self, requests: Sequence[Sequence[NewJob]]) -> list[tuple[str, ...] | QueueError]:
        self._ask()
        answers: list[tuple[str, ...] | QueueError] = []
        for jobs in requests:
            refusal = self.chance.random()
            if refusal < 0.05:
                answers.append(QueueBusy("batch", "jobs", 1, 1, 1, 5))
            elif refusal < 0.08:
                answers.append(QueueFull("full"))
            else:
                names = [job.spec.id for job in jobs]
                answers.append(tuple("exists" if name in self.jobs else "new" for name in names))
                for name in names:
                    self.jobs.setdefault(name, "queued")
        self._ask()
        return answers

    def watch(self, jobs: Sequence[str]) -> None:
        self._ask()

    def known(self, jobs: Sequence[str]) -> list[bool]:
        self._ask()
        return [job in self.jobs for job in jobs]

    def states(self, jobs: Sequence[str]) -> list[tuple[str, int]]:
        self._ask()
        states = [self.jobs.get(job, "") for job in jobs]
        return [(state if state in ("", "queued", "preempted") else "done", 1) for state in states]

    def views(self, jobs: Sequence[str]) -> list[LogView | None]:
        self._ask()
        return [self._view(self.jobs[job]) if job in self.jobs else None for job in jobs]

    def _view(self, state: str) -> LogView:
        if state in ("queued", "preempted"):
            return LogView(1, state, (), 0)
        return LogView(1, "done", (7,), 0, state, FAULT if state == "error" else "")

    def requeue(self, jobs: Sequence[tuple[str, int]]) -> None:
        self._ask()
        for job, _ in jobs:
            if self.jobs.get(job) == "preempted":
                self.jobs[job] = "queued"

    def cancel(self, jobs: Sequence[str]) -> list[str]:
        self._ask()
        codes = []
        for job in jobs:
            state = self.jobs.get(job)
            waits = state in ("queued", "preempted")
            codes.append("gone" if state is None else "ended" if waits else "done")
            if waits:
                self.jobs[job] = "cancelled"
        self._ask()
        return codes

    def forget(self, jobs: Sequence[str]) -> None:
        self._ask()
        for job in jobs:
            assert self.jobs.get(job) not in ("queued", "preempted")
            assert int(job.split("-")[1]) in self.answered, "it is still needed, should this runner die"
            self.jobs.pop(job, None)

    def backlog(self) -> Backlog:
        self._ask()
        return Backlog(0, len(self.jobs))

    # The lease.

    def keep(self, status: BatchStatus, progress: BatchProgress) -> Kept:
        self._ask()
        if self.asked > self.lease_lost_at:
            raise LeaseLost("fenced")
        return Kept("ok", self.asked > self.cancel_at, 10**6)


class Batch:
    """One batch on disk, run by one runner after the other."""

    def __init__(self, root: Path, tokenizer: Tokenizer, count: int) -> None:
        self.id = new_batch_id()
        self.store = FileStore(root)
        self.folder = BatchFolder.create(root, BatchRecord(self.id, COMPLETIONS, "-", 1, 1, 2))
        self.tokenizer = tokenizer
        self.rows = [line(f"l{n}", (n % 7, n), 1, n=1 + n % 3) for n in range(count)]
        self.rows[3] = self.rows[2]  # of the same id
        self.content = jsonl(self.rows[:5]) + b"{no\n" + jsonl(self.rows[5:])

    def run(self, queue: FakeQueue, epoch: int) -> tuple[bool, list[dict[str, Any]]]:
        """Run it; whether it is complete, and all lines that were written."""
        with Ledger.take_over(self.folder, epoch) as ledger:
            queue.answered = ledger.done
            ask = Ask(self.id, COMPLETIONS, "null", self.tokenizer, lambda: Limits(4096))
            total = len(self.rows) + 1
            reader = Reader(ask, io.BytesIO(self.content), total, ledger.done)
            answers = Answers(self.id, self.tokenizer, "null", "fp")
            sizes = Sizes(window=16, lookahead=12, max_tries=3)
            fake: Any = queue
            book = Book(ledger, answers, total)
            found = Run(fake, book, fake, fake, reader, sizes, takes_over=epoch > 1)
            try:
                complete = found.until_drained(lambda: False)
            except LeaseLost:
                return False, []
            if not queue.trouble:
                found.forget()
                assert queue.jobs == {}, "nothing stays in the queue"
            return complete, [row for file_id in ledger.assemble(self.store) if file_id for row in self._rows(file_id)]

    def _rows(self, file_id: str) -> Iterator[dict[str, Any]]:
        with self.store.open(file_id) as file:
            yield from map(orjson.loads, file)

    def check(self, rows: list[dict[str, Any]], cancelled: bool) -> None:
        numbers = sorted(int(row["id"].rpartition("_")[2]) for row in rows)
        assert numbers == list(range(len(self.rows) + 1)), "each line of the input is told of once"
        ids = [row["custom_id"] for row in rows if row["custom_id"] is not None]
        assert sorted(ids) == sorted({row["custom_id"] for row in self.rows})
        codes = {row["error"]["code"] for row in rows if row["error"]}
        assert codes <= {"duplicate_custom_id", "invalid_json", *({"batch_cancelled"} if cancelled else ())}
        for row in rows:
            if row["error"] is not None:
                continue
            if row["response"]["status_code"] != 200:  # of three tries that failed
                assert row["response"]["body"]["error"]["message"] == "no"
            else:
                choices = row["response"]["body"]["choices"]
                assert [choice["text"].strip() for choice in choices] == ["t7"] * len(choices)


@pytest.mark.parametrize("trouble", [0.0, 0.04, 0.12])
@pytest.mark.parametrize("seed", range(12))
def test_no_line_is_lost_or_answered_twice_whatever_fails(
    tmp_path: Path, tokenizer: Tokenizer, seed: int, trouble: float
) -> None:
    batch, queue = Batch(tmp_path, tokenizer, 40), FakeQueue(seed, trouble)
    complete, rows = batch.run(queue, 1)
    assert complete
    batch.check(rows, queue.cancel_at < 10**9)


@pytest.mark.parametrize("seed", range(12))
def test_runners_that_lose_their_lease_one_after_the_other_answer_each_line_once(
    tmp_path: Path, tokenizer: Tokenizer, seed: int
) -> None:
    batch, queue = Batch(tmp_path, tokenizer, 40), FakeQueue(seed, 0.08)
    complete, epoch = False, 0
    rows: list[dict[str, Any]] = []
    while not complete:
        epoch += 1
        queue.lost, queue.events = True, []
        queue.lease_lost_at = queue.asked + queue.chance.randint(5, 120) * epoch
        complete, rows = batch.run(queue, epoch)
    batch.check(rows, queue.cancel_at < 10**9)
