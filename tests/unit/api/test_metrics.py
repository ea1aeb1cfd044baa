"""How a request counts, and when its tokens came."""

from __future__ import annotations

from typing import Any

import pytest

from prelay_api.metrics import Timing, count_refusal, outcome
from prelay_api.relay import End
from prelay_queue.errors import QueueBusy, QueueFull, QueueUnavailable
from prelay_queue.job import FinishReason
from prelay_queue.recorder import Nobody
from prelay_text.errors import RequestError


class Kept(Nobody):
    """Keeps the names of what is recorded."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def inc(self, name: str, *labels: str, by: float = 1) -> None:
        self.seen.append((name, *labels, by))

    def observe(self, name: str, value: float, *labels: str) -> None:
        assert value >= 0
        self.seen.append((name, *labels))

    def count(self, name: str) -> int:
        return sum(entry[0] == f"prelay_{name}_seconds" for entry in self.seen)


@pytest.mark.parametrize(
    ("reasons", "lingers", "wanted"),
    [
        (["stop"], False, "stop"),
        (["stop", "length"], False, "length"),
        (["stop", "error", "deadline"], False, "error"),
        (["deadline", None], False, "deadline"),
        (["stop", None], False, "cancelled"),
        (["stop", None], True, "left"),
        ([None], True, "left"),
    ],
)
def test_a_request_counts_as_the_worst_of_its_choices(reasons: list[str | None], lingers: bool, wanted: str) -> None:
    ends = [None if reason is None else End(FinishReason(reason)) for reason in reasons]
    assert outcome(ends, lingers=lingers) == wanted


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (QueueBusy("batch", "jobs", 9, 1, 9, 500), ("batch", "busy")),
        (QueueFull("full"), ("none", "unavailable")),
        (QueueUnavailable("away"), ("none", "unavailable")),
        (RequestError("no"), ("none", "invalid")),
    ],
)
def test_what_is_not_taken_counts_with_its_reason(error: Exception, wanted: tuple[str, str]) -> None:
    kept = Kept()
    count_refusal(kept, error)
    assert kept.seen == [("prelay_requests_total", *wanted, 1)]


def test_the_first_tokens_are_timed_once_and_the_gaps_between_the_others() -> None:
    kept = Kept()
    timing = Timing(kept, "normal", arrived_at=0.0)
    for count in (1, 2, 2, 5):  # the same number again is no arrival
        timing.tokens(count)
    timing.ended(5)
    assert kept.count("time_to_first_token") == 1
    assert kept.count("inter_token_latency") == 2
    assert kept.count("time_per_output_token") == 1


def test_tokens_that_come_again_after_a_preempt_are_not_counted_again() -> None:
    kept = Kept()
    timing = Timing(kept, "normal", arrived_at=0.0)
    for count in (5, 3, 4, 5, 6):
        timing.tokens(count)
    assert kept.count("inter_token_latency") == 1


def test_an_answer_that_began_elsewhere_has_no_first_token_here() -> None:
    kept = Kept()
    timing = Timing(kept, "normal")
    timing.tokens(8)
    timing.tokens(9)
    timing.ended(9)
    assert [entry[0] for entry in kept.seen] == ["prelay_inter_token_latency_seconds"]


def test_one_token_has_no_pace() -> None:
    kept = Kept()
    timing = Timing(kept, "normal", arrived_at=0.0)
    timing.tokens(1)
    timing.ended(1)
    assert kept.count("time_per_output_token") == 0
