"""What a worker asks of its engine and of its KV transport: the seam between the protocol and the model.

The real engine (prelay_engine) and the null engine (null.py) both stand behind it, so that every rule of the
protocol is tested with the same worker code that serves models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from prelay_engine.flag import Flag
from prelay_engine.sequence import Sequence, Step
from prelay_engine.stats import BlockStats

from .errors import HandoverBroken


class EngineLike(Protocol):
    """The engine, used by the model loop only, except `Transport` copies that touch one sequence's own memory."""

    @property
    def computed_tokens(self) -> int:
        """Positions that went through the model, since the start."""
        ...

    @property
    def prefix_queries(self) -> int:
        """Tokens that came to be prefilled while a prefix cache was on, since the start."""
        ...

    @property
    def prefix_hits(self) -> int:
        """Those of `prefix_queries` that the cache held, so that nobody computed them again."""
        ...

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def has_work(self) -> bool: ...
    def fits(self, total_tokens: int) -> bool:
        """Could one sequence of prompt + answer tokens ever be held, alone?"""
        ...

    @property
    def spare(self) -> int:
        """Blocks for admissions. Below 0 when what runs will ask for more than there are."""
        ...

    def gives(self, key: str) -> int:
        """Blocks by which `spare` grows when this sequence is dropped or released."""
        ...

    def add(self, sequence: Sequence) -> None:
        """Prefill it here. Takes all blocks it needs now, or raises."""
        ...

    def receive(self, sequence: Sequence) -> None:
        """Make room for KV that will be copied in: its blocks are COPYING until `join` or `copied`."""
        ...

    def join(self, key: str) -> None:
        """The copy is complete: decode from the next step on."""
        ...

    def drop(self, key: str) -> bool:
        """Forget it and free its blocks; COPYING ones wait for `copied`."""
        ...

    def copied(self, key: str) -> None:
        """The copy of a dropped sequence has ended: its blocks are free now."""
        ...

    def release(self, key: str) -> None:
        """Give back the blocks of a held sequence."""
        ...

    def step(self, urgent: Flag | None = None) -> Step:
        """Compute one batch. If it has only work of class batch, it may be abandoned once `urgent` is set."""
        ...

    def stats(self) -> BlockStats: ...


class Transport:
    """How KV leaves a prefill worker and reaches a decode worker. A role overrides what it does; the rest refuses."""

    #: Hand-overs work between workers of one domain (a host, or a cluster with a network transport).
    domain: str

    def export(self, key: str, tokens: int) -> bytes:  # noqa: ARG002
        """Describe the held blocks of `key` so that any decode worker of the domain can read them."""
        raise HandoverBroken("this worker hands nothing over")

    def fetch(self, kv: bytes, key: str, tokens: int) -> None:  # noqa: ARG002
        """Copy the KV into the blocks that `receive` made; returns when the copy is complete and checked.

        Called from a copy thread. Raises one of the kinds of HandoverFailed.
        """
        raise HandoverBroken("this worker takes nothing over")

    def peers(self) -> frozenset[str]:
        """Return the workers whose memory is mapped here."""
        return frozenset()

    def orphans(self) -> frozenset[str]:
        """Return those of `peers` that are dead for certain."""
        return frozenset()

    def forget(self, owner: str) -> None:
        """The worker `owner` is lost: unmap its memory once no copy uses it."""

    def close(self) -> None:
        """Unmap and, for what we own, unlink."""


@dataclass(frozen=True, slots=True)
class Backend:
    """An engine with its transport, and what the fleet should know of them."""

    engine: EngineLike
    transport: Transport
    block_size: int
    kv_blocks: int
    context_len: int
    model: str
    detail: dict[str, str]
