"""The pool of KV block ids: who holds which block, in what state, and how often each was handed out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from .errors import NoRoom, UnknownSequence
from .prefix import PrefixTable
from .stats import BlockStats

Generations = npt.NDArray[np.uint64]


class BlockState(StrEnum):
    """The state of all blocks of one owner; a block without an owner is free or cached."""

    IN_USE = "in use"  # read and written by the engine's steps
    COPYING = "copying"  # written by a copy that another thread runs; not to be reused before it ended
    HELD = "held"  # prefilled and waiting to be copied away


@dataclass(slots=True)
class _Lease:
    state: BlockState
    blocks: list[int] = field(default_factory=list)
    shared: int = 0  # of its first blocks, those that were full when it took them


class BlockPool:
    """Hands out block ids 0 … size-1, all or none.

    A block is free, or held by owners, or cached: named in the prefix table and held by nobody. Only a full block is
    ever named, or held by more than one owner, and it is not written any more. Cached blocks are handed out like free
    ones when those run out, the least recently used first, so `available` is what counts for admission.

    `generations` (uint64, one per block) may lie in shared memory. An entry is raised when its block is
    handed out, before anyone can write the block, so a reader that saw the same figure before and after
    its copy knows that the block was not reused in between. Sharing a block is no reuse. Not thread-safe: one thread
    owns the pool.
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
        self._holders = [0] * size  # of each block
        self._doubles = 0  # holders beyond a block's first, over all blocks
        self._table = PrefixTable()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def available(self) -> int:
        """Blocks that can be handed out: free and cached ones."""
        return len(self._free) + self._table.idle

    def take(
        self, owner: str, count: int, state: BlockState = BlockState.IN_USE, shared: Sequence[int] = ()
    ) -> list[int]:
        """Give `owner` `count` more blocks; all its blocks are then in `state`. Raises NoRoom, changing nothing.

        A new owner's first blocks may be `shared` ones, from `match`; they come before the others, which are returned.
        """
        self._check_state(owner, state)
        if shared and owner in self._leases:
            raise ValueError(f"{owner} holds blocks already: shared ones come first")
        if count > self.available - sum(not self._holders[block] for block in shared):
            raise NoRoom(f"{owner} needs {count} blocks, {self.available} of {self.size} are free")
        lease = self._leases.setdefault(owner, _Lease(state))
        for block in shared:  # before any is handed out anew, which could be one of these
            self._hold(block)
        taken = [self._fresh() for _ in range(count)]
        lease.state = state
        lease.shared = lease.shared or len(shared)
        lease.blocks += [*shared, *taken]
        return taken

    def move(self, owner: str, state: BlockState) -> None:
        """Put all blocks of `owner` into `state`."""
        lease = self._lease(owner)
        self._check_state(owner, state)
        lease.state = state

    def _check_state(self, owner: str, state: BlockState) -> None:
        """Blocks are copied into once, at first: later they may be named, and held by others."""
        lease = self._leases.get(owner)
        if lease and state is BlockState.COPYING and lease.state is not BlockState.COPYING:
            raise UnknownSequence(f"the blocks of {owner} are {lease.state}: nothing is copied into them any more")

    def give_back(self, owner: str) -> None:
        """Let go of all blocks of `owner`. Refused while they are COPYING: the copy would write into reused blocks.

        What nobody else holds is free then, or cached if it has a name. The last blocks of a text are reused first: a
        later text is more likely to begin like this one than to go on like it.
        """
        blocks = self._written(owner)
        del self._leases[owner]
        for block in reversed(blocks):
            self._let_go(block)

    # Names

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks that hold what `digests` name, up to the first that is not here."""
        blocks = []
        for digest in digests:
            block = self._table.find(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def name(self, owner: str, index: int, digest: bytes) -> None:
        """The block of `owner` at `index` is full: from now on `match` finds it, unless another has that name."""
        block = self._written(owner)[index]
        if block not in self._table and not self._table.add(digest, block):
            self.touch(self.match((digest,)))

    def share(self, owner: str, index: int, digest: bytes) -> bool:
        """Put a block of this name into the place of the one that `owner` has at `index`, if there is one."""
        block = self._table.find(digest)
        if block is None:
            return False
        blocks = self._written(owner)
        if block != blocks[index]:
            self._hold(block)
            self._let_go(blocks[index])
            blocks[index] = block
        return True

    def keep(self, digest: bytes) -> int | None:
        """A cached block for a copy of what `digest` names; None if there is one, or no block for it."""
        known = self._table.find(digest)
        if known is not None:
            self.touch([known])
        if known is not None or not self.available:
            return None
        block = self._fresh()
        self._table.add(digest, block)
        self._let_go(block)
        return block

    def touch(self, blocks: Sequence[int]) -> None:
        """These, the first of a text first, were used just now."""
        for block in reversed(blocks):
            if not self._holders[block]:
                self._table.set_idle(block)

    def retract(self, digests: Iterable[bytes]) -> None:
        """Take these names away: what the blocks hold is not to be trusted."""
        for digest in digests:
            block = self._table.find(digest)
            if block is not None:
                self._table.remove(block)
                if not self._holders[block]:
                    self._free.append(block)

    def _written(self, owner: str) -> list[int]:
        lease = self._lease(owner)
        if lease.state is BlockState.COPYING:
            raise UnknownSequence(f"the blocks of {owner} are being copied into")
        return lease.blocks

    def _fresh(self) -> int:
        block = self._free.pop() if self._free else self._table.evict()
        self._holders[block] = 1
        self.generations[block] += np.uint64(1)
        return block

    def _hold(self, block: int) -> None:
        self._doubles += self._holders[block] > 0
        self._holders[block] += 1
        self._table.set_held(block)

    def _let_go(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block]:
            self._doubles -= 1
            return
        if block in self._table:
            self._table.set_idle(block)
        else:
            self._free.append(block)

    # What it holds

    def blocks(self, owner: str) -> tuple[int, ...]:
        """The blocks of `owner`, in the order of the positions they hold."""
        return tuple(self._lease(owner).blocks)

    def count(self, owner: str) -> int:
        return len(self._lease(owner).blocks)

    def alone(self, owner: str) -> int:
        """How many blocks become available if `owner` gives its own back: those that nobody else holds."""
        blocks = self._lease(owner).blocks
        return sum(self._holders[block] == 1 for block in blocks) if self._doubles else len(blocks)

    def state(self, owner: str) -> BlockState:
        return self._lease(owner).state

    def stats(self, live: Collection[str]) -> BlockStats:
        leases = self._leases.values()
        copying = sum(len(x.blocks) - x.shared for x in leases if x.state is BlockState.COPYING)
        free, cached = len(self._free), self._table.idle
        return BlockStats(
            total=self.size,
            free=free,
            copying=copying,
            leased=self.size - free - cached - copying,
            cached=cached,
            orphaned=self._orphaned(live),
        )

    def _orphaned(self, live: Collection[str]) -> int:
        dead = [owner for owner in self._leases if owner not in live]
        if not dead:
            return 0
        held = {block for owner, lease in self._leases.items() if owner in live for block in lease.blocks}
        return len({block for owner in dead for block in self._leases[owner].blocks} - held)

    def check(self) -> None:
        """Raise AssertionError unless each block is free, cached or held, and its holders are counted right."""
        holders = [0] * self.size
        for lease in self._leases.values():
            for block in lease.blocks:
                holders[block] += 1
        held = [block for block, count in enumerate(holders) if count]
        if sorted([*self._free, *self._table.idle_blocks(), *held]) != list(range(self.size)):
            raise AssertionError(f"blocks lost or doubled: {self!r}")
        if holders != self._holders or self._doubles != sum(count - 1 for count in holders if count):
            raise AssertionError(f"holders miscounted: {self!r}")

    def _lease(self, owner: str) -> _Lease:
        try:
            return self._leases[owner]
        except KeyError:
            raise UnknownSequence(f"{owner} holds no blocks here") from None

    def __repr__(self) -> str:
        leases = ", ".join(f"{owner}: {len(x.blocks)} {x.state}" for owner, x in self._leases.items())
        return f"<BlockPool {self.free}/{self.size} free, {self._table.idle} cached; {leases or 'nobody holds any'}>"
