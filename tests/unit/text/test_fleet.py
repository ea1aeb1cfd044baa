"""What the heartbeats of a fleet say about its readiness and its limits."""

from __future__ import annotations

from typing import Any

import pytest

from prelay_text.fleet import Fleet, Worker
from prelay_text.resolve import Limits


def worker(role: str, blocks: int = 100, age_ms: int = 0, **changes: Any) -> Worker:
    data = {
        "id": f"{role}-{blocks}", "role": role, "state": "ready", "progress_ms": 0, "block_size": 16,
        "context_len": 4096, "kv": {"total": blocks}, **changes,
    }  # fmt: skip
    return Worker(data, age_ms)


@pytest.mark.parametrize(
    "workers",
    [
        [worker("prefill"), worker("decode")],
        [worker("unified")],
        [worker("prefill", age_ms=9_000), worker("unified")],
        [worker("prefill"), worker("decode", state="draining"), worker("decode")],
    ],
)
def test_a_way_through_the_fleet_is_ready(workers: list[Worker]) -> None:
    assert Fleet(tuple(workers)).problems() == []


@pytest.mark.parametrize(
    ("workers", "problems"),
    [
        ([], ["no prefill worker", "no decode worker"]),
        ([worker("prefill")], ["no decode worker"]),
        ([worker("prefill"), worker("decode", age_ms=4_001)], ["no decode worker is ready: of 1, 1 make no progress"]),
        (
            [worker("prefill", progress_ms=4_001), worker("decode")],
            ["no prefill worker is ready: of 1, 1 make no progress"],
        ),
        (
            [worker("prefill"), worker("decode", state="loading")],
            ["no decode worker is ready: of 1, others are loading"],
        ),
    ],
)
def test_what_is_missing_is_named(workers: list[Worker], problems: list[str]) -> None:
    assert Fleet(tuple(workers)).problems() == problems


@pytest.mark.parametrize(
    ("workers", "pool"),
    [
        ([], None),
        ([worker("prefill")], None),
        ([worker("prefill", 100), worker("decode", 40)], 640),
        ([worker("prefill", 20), worker("decode", 40)], 320),
        ([worker("prefill", 20), worker("prefill", 60), worker("decode", 40), worker("decode", 50)], 800),
        ([worker("unified", 30)], 480),
        ([worker("unified", 30), worker("prefill", 20), worker("decode", 40)], 480),
        ([worker("prefill", 20), worker("decode", 40), worker("decode", 10, age_ms=9_000)], 320),
    ],
)
def test_the_pool_is_the_largest_that_one_request_can_pass_through(workers: list[Worker], pool: int | None) -> None:
    assert Fleet(tuple(workers)).limits(8192) == Limits(4096 if workers else 8192, pool)


def test_a_heartbeat_without_numbers_limits_nothing() -> None:
    assert Fleet((worker("unified", kv=None, context_len=None),)).limits(8192) == Limits(8192, None)
