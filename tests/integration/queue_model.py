"""What the protocol says, in Python: the state of each job as the scripts must keep it. No Redis here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from prelay_queue.state import SWEPT_IN, Event, State, advance

#: Crashes in company after which a job runs alone, crashes alone that end it, crashes of both kinds that end it, and
#: how far past the last crash it must be to have company again.
COMPANY, ALONE, CRASHES, QUARANTINE = 2, 2, 8, 4


@dataclass
class Viewer:
    """A relay: what it has given to its client, which can never be taken back."""

    token: str
    delivered: list[int] = field(default_factory=list)


@dataclass
class Job:
    """One job. `log` holds (epoch, token)."""

    id: str
    max_tokens: int
    viewers: list[Viewer]
    state: State = State.QUEUED
    epoch: int = 1
    owner: str = ""
    exporter: str = ""
    log: list[tuple[int, int]] = field(default_factory=list)
    resumes: dict[int, int] = field(default_factory=lambda: {1: 0})
    crashes: int = 0
    crashes_alone: int = 0
    crashed_at: int = 0
    preemptions: int = 0
    reason: str = ""
    attempts: list[tuple[int, str]] = field(default_factory=list)  # all that ever could write: (epoch, owner)

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token for _, token in self.log)

    @property
    def owned(self) -> bool:
        return SWEPT_IN.get(self.state) == "leases"

    @property
    def alone(self) -> bool:
        return self.crashes >= COMPANY and len(self.log) <= self.crashed_at + QUARANTINE

    @property
    def zombies(self) -> list[tuple[int, str]]:
        """Attempts that may write no more."""
        return [a for a in self.attempts if a != (self.epoch, self.owner) or self.state is State.PREEMPTED]

    def _to(self, event: Event) -> None:
        self.state = advance(self.state, event)

    def claim(self, worker: str) -> None:
        self._to(Event.CLAIM)
        self.owner = worker
        self.attempts.append((self.epoch, worker))

    def handoff(self, token: int) -> None:
        self._to(Event.HANDOFF)
        self.log.append((self.epoch, token))
        self.exporter = self.owner

    def adopt(self) -> None:
        self._to(Event.ADOPT)
        self.exporter = ""

    def emit(self, tokens: Iterable[int]) -> None:
        self._to(Event.EMIT)
        self.log.extend((self.epoch, token) for token in tokens)

    def preempt(self) -> None:
        self._to(Event.PREEMPT)
        self.preemptions += 1
        self.exporter = ""

    def requeue(self, resume: int) -> None:
        self._to(Event.REQUEUE)
        self._restart(resume)

    def reap(self) -> str:
        """The lease ended: which list of the sweep's answer names the job."""
        if self.state is State.PREEMPTED:
            self._to(Event.REAP)
            self._restart(len(self.log))
            return "requeued"
        if self.state is not State.STAGED:
            if self.alone:
                self.crashes_alone += 1
            else:
                self.crashes += 1
            self.crashed_at = len(self.log)
        if self.crashes_alone >= ALONE or self.crashes + self.crashes_alone >= CRASHES:
            self.end("error")
            return "dead"
        self._to(Event.REAP)
        self._restart(len(self.log))
        return "reaped"

    def _restart(self, resume: int) -> None:
        del self.log[resume:]
        self.epoch += 1
        self.owner = self.exporter = ""
        self.resumes[self.epoch] = len(self.log)
        if len(self.log) >= self.max_tokens:
            self.end("length")

    def finish(self, tokens: Iterable[int]) -> None:
        self._to(Event.FINISH)
        self.log.extend((self.epoch, token) for token in tokens)
        self.reason, self.exporter = "stop", ""

    def end(self, reason: str) -> None:
        """By cancel, deadline, crash, or a resume that is complete."""
        self._to(Event.CANCEL)
        self.reason, self.exporter = reason, ""
