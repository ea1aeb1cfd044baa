"""The heads of a worker: jobs that it has claimed and that wait for room, with how long each has waited."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from prelay_queue.job import Claim

from .messages import key_of
from .policy import Head, urgency_after


@dataclass(frozen=True, slots=True)
class _Waiting:
    claim: Claim
    since: float  # monotonic seconds


class Heads:
    """In the order in which they were claimed; who is next, `policy.decide` says."""

    def __init__(self, patience_s: float, needs: Callable[[Claim], int], reserved: Callable[[Claim], bool]) -> None:
        """`needs`: the blocks that one takes when it begins; `reserved`: whether they are for its whole answer."""
        self._patience_s = patience_s
        self._needs = needs
        self._reserved = reserved
        self._waiting: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __repr__(self) -> str:
        return f"Heads({', '.join(self._waiting)})"

    def add(self, claim: Claim) -> None:
        self._waiting[key_of(claim.id, claim.epoch)] = _Waiting(claim, time.monotonic())

    def pop(self, key: str) -> tuple[Claim, int]:
        """Take one that begins, with what its class counts as by now."""
        waiting = self._waiting.pop(key)
        return waiting.claim, self._urgency(waiting)

    def take(self, wanted: Callable[[Claim], bool]) -> list[Claim]:
        """Take those that will not begin here."""
        taken = [key for key, waiting in self._waiting.items() if wanted(waiting.claim)]
        return [self._waiting.pop(key).claim for key in taken]

    def rows(self) -> list[Head]:
        """All of them as the policy sees them."""
        return [
            Head(
                key=key,
                urgency=self._urgency(waiting),
                arrival_ms=waiting.claim.submitted_ms,
                needs=self._needs(waiting.claim),
                reserved=self._reserved(waiting.claim),
                alone=waiting.claim.alone,
            )
            for key, waiting in self._waiting.items()
        ]

    def _urgency(self, waiting: _Waiting) -> int:
        waited_s = time.monotonic() - waiting.since
        return urgency_after(waiting.claim.spec.priority, waited_s, self._patience_s)
