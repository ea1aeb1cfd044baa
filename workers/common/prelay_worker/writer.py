"""The writer thread: every write of a worker to the queue, in order, off the model thread.

The model loop puts operations in; step n+1 computes while step n is written. What has gathered since the last round
trip goes out in one. Stop strings are matched here, so that the canonical end of an answer does not depend on who
watches it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from prelay_queue import failpoints
from prelay_queue.client import SyncQueue
from prelay_queue.errors import QueueError, QueueUnavailable
from prelay_queue.job import FinishReason
from prelay_queue.recorder import NOBODY, Recorder
from prelay_queue.scripts import Call, Emission

from .messages import Exported, Message, Release, Stop, key_of

log = logging.getLogger("prelay.writer")

#: So often may the model loop put something, a step's tokens at a time, before it waits for the queue.
BACKLOG = 1024
#: Tokens of the class batch wait so long for more of the same answer, seconds: nobody reads along token by token, and
#: a short answer is then one write.
PATIENCE_S = 0.1


@dataclass(frozen=True, slots=True)
class Write:
    """An operation on one attempt."""

    job: str
    epoch: int

    @property
    def key(self) -> str:
        return key_of(self.job, self.epoch)


@dataclass(frozen=True, slots=True)
class Tokens(Write):
    """Tokens seq … of the answer, each with a note or none with one; `reason` is set with the last ones.

    Those that are `patient` may be written some time later, but before anything else of their attempt.
    """

    seq: int
    ids: tuple[int, ...]
    reason: FinishReason | None = None
    notes: tuple[str, ...] = ()
    patient: bool = False


@dataclass(frozen=True, slots=True)
class Handoff(Write):
    """The KV is ready and the first token sampled."""

    seq: int
    token: int
    kv: bytes
    note: str = ""


@dataclass(frozen=True, slots=True)
class Adopt(Write):
    """The KV is ours."""


@dataclass(frozen=True, slots=True)
class GiveUp(Write):
    """The attempt's KV is freed; the job goes back to step 1."""

    reason: str


@dataclass(frozen=True, slots=True)
class Recall(Write):
    """A job that waits for a decode worker goes back to step 1, if none has claimed it; only then is its KV freed."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fail(Write):
    """The job ends with an error. `body` is OpenAI's error object as JSON."""

    seq: int
    body: str


@dataclass(frozen=True, slots=True)
class Expire(Write):
    """The deadline has passed and the attempt's KV is freed: the job ends."""


@dataclass(frozen=True, slots=True)
class Begin(Write):
    """An attempt is claimed. One of the same name may have been lost here: a job that Redis lost is submitted anew with
    the next epoch that its API process knows of, and we may have had that one already.
    """


@dataclass(frozen=True, slots=True)
class Forget(Write):
    """Nothing more comes of this attempt: what was put before is written, what is kept for it goes."""


class Matcher(Protocol):
    """Tells the token that completes a stop string."""

    def push(self, token: int) -> object | None: ...


class Writer:
    """One FIFO of operations to the queue. `put` and `watch` are for the model loop."""

    def __init__(
        self,
        queue_: SyncQueue,
        worker: str,
        domain: str,
        post: Callable[[Message], None],
        recorder: Recorder = NOBODY,
    ) -> None:
        self._queue = queue_
        self._scripts = queue_.scripts
        self._worker = worker
        self._domain = domain
        self._post = post
        self._recorder = recorder
        self._fifo: queue.Queue[list[Write] | None] = queue.Queue(maxsize=BACKLOG)
        self._matchers: dict[str, Matcher] = {}
        self._patient: dict[str, Tokens] = {}  # by attempt, not written yet
        self._patient_until = 0.0  # monotonic seconds
        self._over: dict[str, None] = {}  # attempts that ended or were lost: their later writes are dropped
        self._abandon = threading.Event()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Write what is there, for at most `timeout_s`, and end."""
        self._fifo.put(None)
        self._thread.join(timeout_s)
        self._abandon.set()
        self._thread.join()

    def watch(self, key: str, matcher: Matcher) -> None:
        """Match stop strings of this attempt; the matcher has seen the ids that stand already."""
        self._matchers[key] = matcher

    def put(self, operations: Iterable[Write], stamp: Callable[[], None]) -> None:
        """Queue operations in order. Waits, stamping progress, while the queue server does not keep up."""
        together = list(operations)
        while together:
            try:
                self._fifo.put(together, timeout=0.5)
                break
            except queue.Full:
                stamp()

    def _run(self) -> None:
        ended = False
        while not ended:
            batch, ended = self._gather()
            self._write(self._due(batch, all_=ended))

    def _gather(self) -> tuple[list[Write], bool]:
        """What has come, waiting for something, or for the end of a patience; whether it is all that will ever come."""
        batch: list[Write] = []
        try:
            left_s = self._patient_until - time.monotonic()
            together = self._fifo.get(timeout=max(0.0, left_s) if self._patient else None)
            while together is not None:
                for write in together:
                    batch.extend(self._matched(write))
                together = self._fifo.get_nowait()
        except queue.Empty:
            return batch, False
        return batch, True

    def _due(self, batch: list[Write], *, all_: bool) -> list[Write]:
        """What is to be written now, the tokens first that were kept back of the same attempts."""
        due: list[Write] = []
        for write in batch:
            kept = self._patient.pop(write.key, None)
            if isinstance(write, Tokens):
                joined = _joined(kept, write) if kept else write
                if not write.patient or write.reason is not None:
                    due.append(joined)
                    continue
                if not self._patient:
                    self._patient_until = time.monotonic() + PATIENCE_S
                self._patient[write.key] = joined
            else:
                due += [kept, write] if kept else [write]
        if all_ or time.monotonic() >= self._patient_until:
            due += self._patient.values()
            self._patient.clear()
        return due

    def _matched(self, write: Write) -> list[Write]:
        """Apply stop strings, and drop writes of attempts that are over."""
        if isinstance(write, Begin):
            self._over.pop(write.key, None)
            return []
        if write.key in self._over:
            return []
        if isinstance(write, Forget):
            self._matchers.pop(write.key, None)
            return []
        matcher = self._matchers.get(write.key)
        if isinstance(write, (GiveUp, Fail, Expire)):
            self._end(write.key)
        elif isinstance(write, Handoff):
            if matcher is not None and matcher.push(write.token) is not None:
                notes = (write.note,) if write.note else ()
                return [self._stopped(write, write.seq, (write.token,), notes)]
            self._matchers.pop(write.key, None)
        elif isinstance(write, Tokens):
            for n, token in enumerate(write.ids if matcher else (), start=1):
                if matcher is not None and matcher.push(token) is not None:
                    return [self._stopped(write, write.seq, write.ids[:n], write.notes[:n])]
            if write.reason is not None:
                self._end(write.key)
        return [write]

    def _stopped(self, write: Write, seq: int, ids: tuple[int, ...], notes: tuple[str, ...]) -> Tokens:
        self._end(write.key)
        self._post(Stop(write.job, write.epoch, "stop string"))
        return Tokens(write.job, write.epoch, seq, ids, FinishReason.STOP, notes)

    def _end(self, key: str) -> None:
        self._matchers.pop(key, None)
        self._over[key] = None
        while len(self._over) > 4096:
            del self._over[next(iter(self._over))]

    def _write(self, batch: list[Write]) -> None:
        """Send a batch in order, again and again until Redis answers: every script is safe to repeat."""
        if not batch:
            return
        failpoints.hit("writer.before")
        groups = _group(batch)
        calls = [self._call(group) for group in groups]
        delay = 0.05
        while not self._abandon.is_set():
            try:
                answers = self._queue.run_many(calls)
                for answer in answers:
                    if isinstance(answer, QueueUnavailable):
                        raise answer
                break
            except QueueUnavailable as error:
                log.warning("writer: %s; again in %.2f s", error, delay)
                self._abandon.wait(delay)
                delay = min(2 * delay, 1.0)
            except QueueError as error:
                log.error("writer: %s", error)
                answers = [error] * len(calls)
                break
        else:
            return
        failpoints.hit("writer.after")
        for group, answer in zip(groups, answers, strict=True):
            self._settle(group, answer)

    def _call(self, group: list[Write]) -> Call[Any]:
        write = group[0]
        match write:
            case Tokens(reason=None):
                emissions = [Emission(w.job, w.epoch, w.seq, w.ids, w.notes) for w in group if isinstance(w, Tokens)]
                return self._scripts.emit(self._worker, emissions)
            case Tokens(job, epoch, seq, ids, reason, notes, _):
                return self._scripts.finish(job, epoch, self._worker, seq, ids, str(reason), notes=notes)
            case Handoff(job, epoch, seq, token, kv, note):
                lease_ms = self._queue.settings.times.lease_ms
                return self._scripts.handoff(job, epoch, self._worker, seq, token, kv, self._domain, lease_ms, note)
            case Adopt(job, epoch):
                return self._scripts.adopt(job, epoch, self._worker)
            case GiveUp(job, epoch, reason) | Recall(job, epoch, reason):
                return self._scripts.preempt(job, epoch, self._worker, reason)
            case Fail(job, epoch, seq, body):
                return self._scripts.finish(job, epoch, self._worker, seq, (), FinishReason.ERROR, body)
            case Expire(job, epoch):
                return self._scripts.finish(job, epoch, self._worker, 0, (), FinishReason.DEADLINE)
        raise AssertionError(f"no script for {write}")

    def _settle(self, group: list[Write], answer: Any) -> None:
        emitted = isinstance(answer, list)
        codes = [each.code for each in answer] if emitted else [str(answer)] * len(group)
        for write, code in zip(group, codes, strict=True):
            self._count(write, code)
            if code == "ok":
                if isinstance(write, Handoff):
                    self._post(Exported(write.key))
                elif isinstance(write, Recall):
                    self._post(Release(write.job, write.epoch))
            elif isinstance(write, Recall):
                pass  # claimed meanwhile, or over: as with every export, we are told when nobody reads it any more
            else:
                # fenced, done, gone, gap, illegal or refused: this attempt is not ours to write any more.
                self._end(write.key)
                self._post(Stop(write.job, write.epoch, code))

    def _count(self, write: Write, code: str) -> None:
        if code == "fenced":
            self._recorder.inc("prelay_fenced_writes_total", type(write).__name__.lower())
        elif code == "ok" and isinstance(write, GiveUp | Recall):
            # The reason of a failed hand-over says more than a label may.
            cause = "handover" if write.reason.startswith("hand-over") else write.reason
            self._recorder.inc("prelay_preemptions_total", cause)


def _group(batch: list[Write]) -> list[list[Write]]:
    """Put consecutive plain emissions into one group, joining those that continue each other; keep the order."""
    groups: list[list[Write]] = []
    places: dict[str, int] = {}  # of each attempt in the last group
    for write in batch:
        if not groups or not _plain(write) or not _plain(groups[-1][0]):
            groups.append([])
            places.clear()
        last = groups[-1]
        place = places.setdefault(write.key, len(last))
        before = last[place] if place < len(last) else None
        if isinstance(write, Tokens) and isinstance(before, Tokens):
            last[place] = _joined(before, write)
        else:
            last.append(write)
    return groups


def _joined(first: Tokens, second: Tokens) -> Tokens:
    """Tokens that follow each other. A note keeps its place, also where others have none."""
    notes: tuple[str, ...] = ()
    if first.notes or second.notes:
        notes = tuple(note for part in (first, second) for note in part.notes or ("",) * len(part.ids))
    return replace(first, ids=first.ids + second.ids, reason=second.reason, notes=notes)


def _plain(write: Write) -> bool:
    return isinstance(write, Tokens) and write.reason is None
