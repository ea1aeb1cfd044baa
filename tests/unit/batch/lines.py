"""Lines for tests that need no tokenizer."""

from __future__ import annotations

from prelay_batch.life import Line
from prelay_queue.events import LogView
from prelay_queue.job import Priority, Sampling
from prelay_text.request import CompletionRequest
from prelay_text.resolve import JobPart


def line(number: int = 0, ids: tuple[int, ...] = (1, 2), choices: int = 1, size: int = 10) -> Line:
    request = CompletionRequest(model="m", prompts=(ids,), n=choices)
    parts = [JobPart(choice, ids, Sampling(4), Priority.NORMAL) for choice in range(choices)]
    return Line(number, f"id {number}", request, parts, size)


def ended(reason: str = "length", error: str = "", ids: tuple[int, ...] = (7,)) -> LogView:
    return LogView(1, "done", ids, 0, reason, error)
