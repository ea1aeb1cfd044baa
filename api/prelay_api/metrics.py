"""What an API process times and counts: when tokens came, and how requests ended. No request ends by it."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prelay_queue.errors import QueueBusy, QueueFull, QueueUnavailable
from prelay_queue.job import FinishReason
from prelay_queue.metric_table import NO_CLASS
from prelay_queue.recorder import NOBODY, Recorder
from prelay_text.errors import RequestError

from .relay import End


class Timing:
    """When the tokens of one choice came. `arrived_at`: of the request, monotonic seconds; None for a viewer that joins
    an answer which began elsewhere.
    """

    def __init__(self, recorder: Recorder = NOBODY, cls: str = NO_CLASS, arrived_at: float | None = None) -> None:
        self.recorder = recorder
        self.cls = cls
        self._arrived_at = arrived_at
        self._first = self._last = 0.0
        self._count = 0

    def tokens(self, count: int) -> None:
        """The answer has so many tokens, now. No more than once before says nothing: a preempt brings some again."""
        if count <= self._count:
            return
        now, self._count = time.monotonic(), count
        if self._last:
            self.recorder.observe("prelay_inter_token_latency_seconds", now - self._last, self.cls)
        else:
            self._first = now
            if self._arrived_at is not None:
                self.recorder.observe("prelay_time_to_first_token_seconds", now - self._arrived_at, self.cls)
        self._last = now

    def ended(self, tokens: int) -> None:
        """The answer is complete, with so many tokens."""
        if self._arrived_at is not None and tokens > 1:
            pace = (self._last - self._first) / (tokens - 1)
            self.recorder.observe("prelay_time_per_output_token_seconds", pace, self.cls)

    def requeued(self, discarded: int) -> None:
        """A preempt was answered; so many tokens that were sampled are worth nothing."""
        self.recorder.inc("prelay_requeues_total", self.cls)
        self.recorder.inc("prelay_wasted_tokens_total", "discarded", by=discarded)

    def resubmitted(self) -> None:
        """Redis had lost the job."""
        self.recorder.inc("prelay_resubmits_total", self.cls)


def outcome(ends: Iterable[End | None], *, lingers: bool) -> str:
    """How a request ended, by the ends of its choices: the worst counts. None: it was left before its end, by a client
    that may come back (`lingers`) or not.
    """
    reasons = {None if end is None else end.reason for end in ends}
    for reason in (FinishReason.ERROR, FinishReason.DEADLINE, FinishReason.CANCELLED):
        if reason in reasons:
            return reason
    if None in reasons:
        return "left" if lingers else "cancelled"
    return FinishReason.LENGTH if FinishReason.LENGTH in reasons else FinishReason.STOP


def count_refusal(recorder: Recorder, error: Exception) -> None:
    """Count a request that was not taken."""
    match error:
        case QueueBusy(cls=cls):
            recorder.inc("prelay_requests_total", cls, "busy")
        case QueueFull() | QueueUnavailable():
            recorder.inc("prelay_requests_total", NO_CLASS, "unavailable")
        case RequestError():
            recorder.inc("prelay_requests_total", NO_CLASS, "invalid")
