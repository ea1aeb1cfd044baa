"""What a worker counts and times.

The model loop adds whole numbers to a dict for each token, and talks to the metrics once a step, or once an attempt.
"""

from __future__ import annotations

import time
from collections import Counter

from prelay_engine.sequence import NewToken, Sequence
from prelay_queue.job import Claim
from prelay_queue.metric_table import Part
from prelay_queue.metrics import Metrics

from .attempt import Attempt
from .backend import EngineLike


class WorkerMetrics:
    """The metrics of one worker process. All but `recorder` is for the model loop."""

    def __init__(self) -> None:
        self.recorder = Metrics(Part.WORKER, Part.EVERY)
        self._sampled: Counter[str] = Counter()  # since the last `stepped`, by class
        self._engine = {"computed_tokens": 0, "prefix_queries": 0, "prefix_hits": 0}

    def began(self, attempt: Attempt, sequence: Sequence, server_ms: int) -> None:
        """There is room for it: its wait is over, by the server's clock."""
        claim, times = attempt.claim, attempt.times
        times.began, times.sequence = time.monotonic(), sequence
        if claim.queued_ms and server_ms:
            stage = "decode_queue" if claim.kv else "queue"
            self._observe(stage, (server_ms - claim.queued_ms) / 1000, claim)

    def copied(self, attempt: Attempt) -> None:
        """Its KV is here."""
        times = attempt.times
        times.decoding = time.monotonic()
        self._observe("handover", times.decoding - times.began, attempt.claim)

    def sampled(self, attempt: Attempt, new: NewToken, now: float) -> None:
        """A token of it was sampled at `now`, monotonic seconds."""
        times, claim = attempt.times, attempt.claim
        self._sampled[claim.spec.priority] += 1
        if not times.decoding:
            times.decoding = now
            self._prefilled(attempt)
        elif new.finish is not None:
            self._observe("decode", now - times.decoding, claim)

    def stepped(self, engine: EngineLike) -> None:
        """A step is over."""
        for cls, tokens in self._sampled.items():
            self.recorder.inc("prelay_generation_tokens_total", cls, by=tokens)
        self._sampled.clear()
        self._follow("prelay_computed_tokens_total", "computed_tokens", engine.computed_tokens)
        self._follow("prelay_prefix_cache_queries_total", "prefix_queries", engine.prefix_queries)
        self._follow("prelay_prefix_cache_hits_total", "prefix_hits", engine.prefix_hits)

    def _prefilled(self, attempt: Attempt) -> None:
        claim, times = attempt.claim, attempt.times
        self._observe("prefill", times.decoding - times.began, claim)
        if claim.epoch == 1:
            self.recorder.inc("prelay_prompt_tokens_total", claim.spec.priority, by=len(claim.spec.prompt_ids))
        else:
            hits = times.sequence.hits if times.sequence else 0
            again = len(claim.spec.prompt_ids) + len(claim.ids) - hits
            self.recorder.inc("prelay_wasted_tokens_total", "recomputed", by=again)

    def _observe(self, stage: str, seconds: float, claim: Claim) -> None:
        self.recorder.observe(f"prelay_request_{stage}_time_seconds", seconds, claim.spec.priority)

    def _follow(self, name: str, what: str, value: int) -> None:
        """Count by how much a figure of the engine grew."""
        if value != self._engine[what]:
            self.recorder.inc(name, by=value - self._engine[what])
            self._engine[what] = value
