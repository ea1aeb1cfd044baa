"""What a worker's model loop counts and times, and that it has the time to."""

from __future__ import annotations

import time
from typing import Any

import orjson

from prelay_engine.sequence import NewToken
from prelay_queue.recorder import Nobody
from prelay_worker.attempt import Attempt
from prelay_worker.config import Role
from prelay_worker.metrics import WorkerMetrics
from prelay_worker.worker import Worker
from tests.unit.worker.desk import give, make_claim, make_worker, step

STAGES = ("queue", "prefill", "handover", "decode_queue", "decode")


class Kept(Nobody):
    """Adds up counters, and keeps how often each histogram was asked."""

    def __init__(self) -> None:
        self.counted: dict[tuple[str, ...], float] = {}
        self.timed: dict[str, int] = {}

    def inc(self, name: str, *labels: str, by: float = 1) -> None:
        self.counted[name, *labels] = self.counted.get((name, *labels), 0) + by

    def observe(self, name: str, value: float, *labels: str) -> None:
        self.timed[name] = self.timed.get(name, 0) + 1

    def stages(self) -> list[int]:
        return [self.timed.get(f"prelay_request_{stage}_time_seconds", 0) for stage in STAGES]


def recorded(role: Role) -> tuple[Worker, Kept]:
    """A worker whose server's clock is known."""
    worker, _ = make_worker(role)
    kept = Kept()
    worker.metrics.recorder = kept  # type: ignore[assignment]
    worker.leases._beaten = (5_000, time.monotonic())
    return worker, kept


def finish(worker: Worker) -> None:
    while worker.engine.has_work:
        step(worker)


def test_a_unified_worker_times_three_stages_and_counts_prompt_and_answer() -> None:
    worker, kept = recorded(Role.UNIFIED)
    give(worker, make_claim(prompt=4, max_tokens=8, queued_ms=4_000))
    finish(worker)
    assert kept.stages() == [1, 1, 0, 0, 1]
    assert kept.counted["prelay_prompt_tokens_total", "normal"] == 4
    assert kept.counted["prelay_generation_tokens_total", "normal"] == 8
    assert kept.counted["prelay_computed_tokens_total",] == 4 + 7
    assert ("prelay_wasted_tokens_total", "recomputed") not in kept.counted


def test_a_prefill_worker_times_what_it_does_and_no_decode() -> None:
    worker, kept = recorded(Role.PREFILL)
    give(worker, make_claim(queued_ms=4_000))
    step(worker)
    assert kept.stages() == [1, 1, 0, 0, 0]


def test_a_decode_worker_times_the_wait_the_copy_and_the_decode_and_counts_no_prompt() -> None:
    worker, kept = recorded(Role.DECODE)
    kv = orjson.dumps({"null": "r/0", "tokens": 4, "gen": 1})  # of the prompt: the first token has none yet
    give(worker, make_claim(prompt=4, ids=(1,), max_tokens=8, queued_ms=4_000, kv=kv))
    give(worker, worker._inbox.get(timeout=10))  # of the copy thread
    finish(worker)
    assert kept.stages() == [0, 0, 1, 1, 1]
    assert not [key for key in kept.counted if "prompt" in key[0] or "wasted" in key[0]]


def test_a_later_attempt_counts_what_it_computes_again_but_for_what_a_cache_had() -> None:
    worker, kept = recorded(Role.UNIFIED)
    give(worker, make_claim(prompt=6, max_tokens=8, epoch=2, ids=(1, 2, 3), kv=b""))
    (attempt,) = worker.attempts.values()
    assert attempt.times.sequence is not None
    attempt.times.sequence.hits = 4  # as the engine says it
    finish(worker)
    assert kept.counted["prelay_wasted_tokens_total", "recomputed"] == 6 + 3 - 4
    assert ("prelay_prompt_tokens_total", "normal") not in kept.counted


def test_where_the_server_s_clock_is_not_known_no_wait_is_guessed() -> None:
    worker, kept = recorded(Role.UNIFIED)
    worker.leases._beaten = None
    give(worker, make_claim(queued_ms=4_000))
    step(worker)
    assert kept.stages()[:2] == [0, 1]


def test_a_step_of_32_rows_is_counted_in_less_than_a_hundredth_of_4_ms() -> None:
    metrics = WorkerMetrics()
    attempts = [Attempt(make_claim(f"r{number}/0"), 0, 1, 0) for number in range(32)]
    tokens = [NewToken(attempt.key, 3, 7) for attempt in attempts]
    engine: Any = make_worker(Role.UNIFIED)[0].engine
    best_ns = 10**9
    for _ in range(300):  # of this thread's own time, so that a busy machine does not count
        began = time.thread_time_ns()
        now = time.monotonic()
        for attempt, new in zip(attempts, tokens, strict=True):
            metrics.sampled(attempt, new, now)
        engine.computed_tokens += 32
        metrics.stepped(engine)
        best_ns = min(best_ns, time.thread_time_ns() - began)
    assert best_ns < 40_000
