"""The pool of KV block ids: who holds which block, in what state, and how often each was handed out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from .errors import NoRoom, UnknownSequence
from .stats import BlockStats

Generations = npt.NDArray[np.uint64]


class BlockState(StrEnum):
    """The state of all blocks of one owner; a block without an owner is free."""

    IN_USE = "in use"  # read and written by the engine's steps
    COPYING = "copying"  # written by a copy that another thread runs; not to be reused before it ended
    HELD = "held"  # prefilled and waiting to be copied away


@dataclass(slots=True)
class _Lease:
    state: BlockState
    blocks: list[int] = field(default_factory=list)


class BlockPool:
    """Hands out block ids 0 … size-1, all or none, each to one owner at a time.

    `generations` (uint64, one per block) may lie in shared memory. An entry is raised when its block is
    handed out, before anyone can write the block, so a reader that saw the same figure before and after
    its copy knows that the block was not reused in between. Not thread-safe: one thread owns the pool.
    """

    def __init__(self, size: int, generations: Generations | None = None) -> None:
        if generations is None:
            generations = np.zeros(size, dtype=np.uint64)
        if generations.shape != (size,) or generations.dtype != np.uint64:
            raise ValueError(f"generations must be uint64 of shape ({size},)")
        self.size = size
        self.generations = generations
        self._free = list(range(size - 1, -1, -1))
        self._leases: dict[str, _Lease] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, owner: str, count: int, state: BlockState = BlockState.IN_USE) -> list[int]:
        """Give `owner` `count` more blocks; all its blocks are then in `state`. Raises NoRoom, changing nothing."""
        if count > len(self._free):
            raise NoRoom(f"{owner} needs {count} blocks, {len(self._free)} of {self.size} are free")
        lease = self._leases.setdefault(owner, _Lease(state))
        taken = [self._free.pop() for _ in range(count)]
        self.generations[taken] += np.uint64(1)
        lease.state = state
        lease.blocks += taken
        return taken

    def move(self, owner: str, state: BlockState) -> None:
        """Put all blocks of `owner` into `state`."""
        self._lease(owner).state = state

    def give_back(self, owner: str) -> None:
        """Free all blocks of `owner`. Refused while they are COPYING: the copy would write into reused blocks."""
        lease = self._lease(owner)
        if lease.state is BlockState.COPYING:
            raise UnknownSequence(f"the blocks of {owner} are being copied into")
        del self._leases[owner]
        self._free += reversed(lease.blocks)

    def blocks(self, owner: str) -> tuple[int, ...]:
        """The blocks of `owner`, in the order of the positions they hold."""
        return tuple(self._lease(owner).blocks)

    def count(self, owner: str) -> int:
        return len(self._lease(owner).blocks)

    def state(self, owner: str) -> BlockState:
        return self._lease(owner).state

    def stats(self, live: Collection[str]) -> BlockStats:
        by_state = dict.fromkeys(BlockState, 0)
        orphaned = 0
        for owner, lease in self._leases.items():
            by_state[lease.state] += len(lease.blocks)
            orphaned += len(lease.blocks) if owner not in live else 0
        return BlockStats(
            total=self.size,
            free=len(self._free),
            copying=by_state[BlockState.COPYING],
            leased=by_state[BlockState.IN_USE] + by_state[BlockState.HELD],
            cached=0,
            orphaned=orphaned,
        )

    def check(self) -> None:
        """Raise AssertionError unless every block is free or owned, exactly once."""
        seen = list(self._free)
        for lease in self._leases.values():
            seen += lease.blocks
        if sorted(seen) != list(range(self.size)):
            raise AssertionError(f"blocks lost or doubled: {self!r}")

    def _lease(self, owner: str) -> _Lease:
        try:
            return self._leases[owner]
        except KeyError:
            raise UnknownSequence(f"{owner} holds no blocks here") from None

    def __repr__(self) -> str:
        leases = ", ".join(f"{owner}: {len(x.blocks)} {x.state}" for owner, x in self._leases.items())
        return f"<BlockPool {self.free}/{self.size} free; {leases or 'nobody holds any'}>"
