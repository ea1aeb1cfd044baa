"""A client of one job behind the API's own relay, without I/O: a test says when it hears, reads and is answered."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Protocol, TypeVar

from prelay_api.relay import Action, Deliver, End, Relay, Requeue, Reread, Resubmit, Rewind
from prelay_queue.events import LiveEvent
from prelay_queue.job import FinishReason
from prelay_queue.scripts import Call, NewJob, Scripts

R = TypeVar("R")


def note_of(token: int) -> str:
    """What is said of a token: nothing of every fourth."""
    return f"note of {token}" if token % 4 else ""


class Run(Protocol):
    """Sends a call."""

    def __call__(self, call: Call[R], /) -> R: ...


class Viewer:
    """What one client was given can never be taken back; the relay must see to it."""

    def __init__(self, job: NewJob, api: str, token: str, heard: int) -> None:
        self.job = replace(job, attachment=token)
        self.api = api
        self.token = token
        self.relay = Relay(job.spec.sampling.max_tokens)
        self.asked: deque[Action] = deque()  # of Redis, not yet answered; events wait meanwhile
        self.waiting: deque[LiveEvent] = deque()
        self.given: list[int] = []  # to the assembler
        self.seen: list[int] = []  # by the client
        self.heard = heard  # entries of the live stream that are behind it
        self.end: End | None = None

    def __repr__(self) -> str:
        return f"Viewer({self.token}, seen={len(self.seen)}, asked={list(self.asked)}, {self.relay!r})"

    @property
    def id(self) -> str:
        return self.job.spec.id

    def hear(self, events: list[LiveEvent]) -> None:
        """Events come from the live stream."""
        self.waiting.extend(event for event in events if event.job == self.id)
        self._listen()

    def want_log(self) -> None:
        """Silence, or a lost connection."""
        if self.end is None and not any(isinstance(action, Reread) for action in self.asked):
            self.asked.append(Reread())

    def read(self, held_back: int = 0) -> None:
        """The client's socket takes a frame; the assembler may hold back the last few tokens."""
        if self.relay.frozen:
            return
        self.given.extend(self.relay.take())
        count = max(len(self.seen), len(self.given) - held_back)
        self.relay.mark_delivered(count)
        self.seen.extend(self.given[len(self.seen) : count])
        for seq, token in enumerate(self.relay.ids):
            assert self.relay.notes.get(seq, "") == note_of(token), f"{self} has another token's note at {seq}"

    def act(self, scripts: Scripts, run: Run) -> None:
        """Redis answers what was asked first."""
        match self.asked.popleft():
            case Requeue(epoch, resume):
                answer = run(scripts.requeue(self.id, epoch, resume, self.token))
                self._perform(self.relay.on_requeued(answer))
            case Resubmit(epoch, ids, notes):
                (code,) = run(scripts.submit([replace(self.job, epoch=epoch, ids=ids, notes=notes)]))
                self._perform(self.relay.on_submitted(code, epoch))
            case Reread():
                view = run(scripts.view(self.id))
                actions = self.relay.on_log(view)
                self._perform(actions)
                if self.end is not None and self.end.reason in (FinishReason.STOP, FinishReason.LENGTH) and view:
                    assert tuple(self.relay.ids) == view.ids, f"{self} ends with another answer than the log's"
            case action:
                raise AssertionError(f"{action} asks nothing")
        self._listen()

    def _listen(self) -> None:
        while self.waiting and not self.asked:
            self._perform(self.relay.on_event(self.waiting.popleft()))

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Rewind(count):
                    assert count >= len(self.seen), f"{self} takes back what was seen"
                    del self.given[count:]
                case End():
                    assert self.end is None, f"{self} ends twice"
                    self.end = action
                case Deliver():
                    pass
                case _:
                    self.asked.append(action)
