"""The life of one line: its tries, and what becomes of it when one of its jobs has ended. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import orjson

from prelay_queue.events import LogView
from prelay_queue.job import FinishReason
from prelay_text.batch_line import Refusal
from prelay_text.request import ChatRequest, CompletionRequest
from prelay_text.resolve import JobPart
from prelay_text.whole import Answer

#: Tries of a line beyond those that failed by a fault: ended by an operator, or because no runner watched.
MAX_CANCELLED = 20


#: A fault of ours: code, message, status and type of a refusal.
FAULT = "internal_error", "the server failed on this request", 500, "server_error"


@dataclass(frozen=True, slots=True)
class Answered:
    """All choices of the line have ended well."""

    answers: Sequence[Answer]


@dataclass(frozen=True, slots=True)
class Again:
    """The line is to be run again, as its next try. What still runs of this one is to be cancelled."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The line is over without an answer. What still runs of it is to be cancelled."""

    refusal: Refusal


@dataclass(frozen=True, slots=True)
class Late:
    """The line's jobs met a deadline: the batch's, or its own, and `refusal` says that it was its own."""

    refusal: Refusal


Verdict = Answered | Again | Refused | Late


@dataclass(eq=False, slots=True)
class Line:
    """A line that is being run. `number` is that in the file, from 0; `size` in bytes."""

    number: int
    custom_id: str
    request: CompletionRequest | ChatRequest
    parts: list[JobPart]
    size: int
    attempt: int = 0
    failures: int = 0
    cancelled: int = 0
    ended: dict[int, LogView] = field(default_factory=dict)  # of this try, by choice
    over: list[str] = field(default_factory=list)  # jobs of all tries that have ended, to be forgotten with the line
    looked: float = 0.0  # when this try's jobs were last heard of, seconds

    def request_id(self, batch_id: str) -> str:
        return f"{batch_id}-{self.number}-{self.attempt}"

    def job_ids(self, batch_id: str) -> list[str]:
        request = self.request_id(batch_id)
        return [f"{request}/{part.choice}" for part in self.parts]

    def on_end(self, choice: int, view: LogView, max_tries: int) -> Verdict | None:
        """One of the jobs of this try has ended; None: others of it run on, and nothing is decided."""
        match FinishReason(view.reason):
            case FinishReason.STOP | FinishReason.LENGTH:
                self.ended[choice] = view
                return self._answered() if len(self.ended) == len(self.parts) else None
            case FinishReason.DEADLINE:
                return Late(self._late())
            case FinishReason.CANCELLED:
                self.cancelled += 1
                return Again() if self.cancelled <= MAX_CANCELLED else Refused(self._given_up())
            case FinishReason.ERROR:
                refusal = job_error(self.custom_id, view.error)
                self.failures += refusal.status >= 500
                again = refusal.status >= 500 and self.failures < max_tries
                return Again() if again else Refused(refusal)

    def begin_again(self) -> None:
        """As the next try."""
        self.attempt += 1
        self.ended = {}

    def await_all(self, batch_id: str) -> None:
        """All jobs of this try are to end, also those that had."""
        jobs = self.job_ids(batch_id)
        self.ended = {}
        self.over = [job for job in self.over if job not in jobs]

    def _answered(self) -> Answered:
        views = [self.ended[part.choice] for part in self.parts]
        return Answered([Answer(view.ids, view.notes, FinishReason(view.reason)) for view in views])

    def _late(self) -> Refusal:
        message = "the request was not complete by its deadline"
        return Refusal(self.custom_id, "deadline_exceeded", message, 504, "server_error")

    def _given_up(self) -> Refusal:
        message = f"the line was cancelled {self.cancelled} times while it ran, and is not run again"
        return Refusal(self.custom_id, "cancelled", message, 500, "server_error")


def job_error(custom_id: str, error: str) -> Refusal:
    """A job's error body as its line tells it: OpenAI's fields and an HTTP status; whatever it is, it is an error."""
    try:
        found = orjson.loads(error)
        status = found.get("status")
        valid = isinstance(status, int) and 400 <= status <= 599
        return Refusal(
            custom_id,
            str(found.get("code") or "server_error"),
            str(found["message"]),
            status if valid else 500,
            str(found.get("type") or "server_error"),
            found.get("param") if isinstance(found.get("param"), str) else None,
        )
    except (ValueError, KeyError, AttributeError, TypeError):
        return Refusal(custom_id, *FAULT)
