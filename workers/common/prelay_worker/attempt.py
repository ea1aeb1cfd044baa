"""One attempt that a worker holds: from the moment there is room for it until its blocks are free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prelay_engine.sequence import Sequence
from prelay_queue.job import Claim
from prelay_queue.logs import about

from .messages import key_of
from .policy import Holder


@dataclass(slots=True)
class Times:
    """When an attempt passed its stages here, monotonic seconds; 0 is not yet."""

    began: float = 0.0
    decoding: float = 0.0
    sequence: Sequence | None = None  # what the engine was given


@dataclass(slots=True)
class Attempt:
    """One attempt that this worker holds. `emitted` counts the tokens put to the writer, over the whole answer."""

    claim: Claim
    emitted: int
    urgency: int  # what its class counted as when it began (policy.py)
    reserved: int  # blocks of its reservation, 0 without one
    slot: bool = True  # takes one; a prefilled one that is held for a decode worker does not
    moving: bool = False  # its copy or its hand-over is under way
    leaving: bool = False  # asked back from the decode stream, and not answered
    exported: bool = False
    released: bool = False  # the release overtook the answer to our own hand-over
    times: Times = field(default_factory=Times)

    @property
    def key(self) -> str:
        return key_of(self.claim.id, self.claim.epoch)

    @property
    def about(self) -> dict[str, Any]:
        """Fields of a log line about it."""
        return about(self.claim.id, self.claim.epoch)

    @property
    def alone(self) -> bool:
        """Whether it may have no neighbour yet: it is not past the step at which it crashed."""
        return self.emitted <= self.claim.alone_until

    def sequence(self) -> Sequence:
        """It as the engine is given it."""
        return Sequence(
            key=self.key,
            prompt_ids=self.claim.spec.prompt_ids,
            sampling=self.claim.spec.sampling,
            ids=list(self.claim.ids),
            priority=self.urgency,
            arrival_ms=self.claim.submitted_ms,
            reserved=self.reserved > 0,
        )

    def holder(self, gives: int, max_preemptions: int) -> Holder:
        """It as the policy sees it; `gives` is what the engine would have free without it, blocks."""
        return Holder(
            key=self.key,
            urgency=self.urgency,
            arrival_ms=self.claim.submitted_ms,
            gives=gives,
            slot=self.slot,
            reserved=self.reserved,
            leaving=self.leaving,
            fixed=self.moving or self.claim.preemptions >= max_preemptions,
        )
