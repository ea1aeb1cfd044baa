"""Which blocks hold which beginnings of texts, so that what was computed once is computed once.

A full block is named by a chained digest: of the digest before it and of its own ids. So a name stands for all ids from
the first one on, and two blocks of one name hold the same keys (where the self-test passed: the same bits).

State: the table (name → block), and among its blocks those that no sequence holds, in the order of their last use.
Owner: the block pool, which counts the holders (`blocks.py`); nothing else writes it. It is a process's own memory:
with the process it is gone, and so is the pool that it speaks of. A block is named only after a forward has written all
its positions, and a named block is never written again, so wherever an error strikes, no name says too much: a block
without a name is freed with its sequence, and a name goes before its block is handed out for another use.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence

#: Goes into every digest, so that equal ids have equal names in every process and release of this format.
_SEED = b"prelay prefix 1"


class Chain:
    """The digests of the full blocks of one sequence, computed as they are asked for.

    `read(start, count)` gives ids of the sequence. A block may be asked for once its ids stand. Sequences of other
    `salt` share nothing.
    """

    def __init__(self, read: Callable[[int, int], Sequence[int]], block_size: int, salt: bytes = b"") -> None:
        self._read = read
        self._size = block_size
        self._root = _digest(_SEED, salt)
        self.digests: list[bytes] = []

    def __getitem__(self, index: int) -> bytes:
        """The name of block `index`, which holds positions [index · size, (index + 1) · size)."""
        while len(self.digests) <= index:
            ids = self._read(len(self.digests) * self._size, self._size)
            assert len(ids) == self._size, "only a full block has a name"
            parent = self.digests[-1] if self.digests else self._root
            self.digests.append(_digest(parent, struct.pack(f"<{self._size}I", *ids)))
        return self.digests[index]


def _digest(parent: bytes, content: bytes) -> bytes:
    """32 bytes: nobody can choose ids so that another's block has the same name."""
    return hashlib.blake2b(parent + content, digest_size=32).digest()


class PrefixTable:
    """Names of blocks, and the idle ones among them: held by nobody, and reused when no unnamed block is free."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def __contains__(self, block: int) -> bool:
        return block in self._digests

    def __len__(self) -> int:
        return len(self._digests)

    @property
    def idle(self) -> int:
        return len(self._idle)

    def find(self, digest: bytes) -> int | None:
        return self._blocks.get(digest)

    def add(self, digest: bytes, block: int) -> bool:
        """Name a block that is held. False, and nothing happens, if another block has that name already."""
        if digest in self._blocks:
            return False
        assert block not in self._digests, "a block is named once"
        self._blocks[digest] = block
        self._digests[block] = digest
        return True

    def set_idle(self, block: int) -> None:
        """Nobody holds this named block any more; it was used just now."""
        self._idle[block] = None
        self._idle.move_to_end(block)

    def set_held(self, block: int) -> None:
        """Somebody holds this named block. Harmless to repeat."""
        self._idle.pop(block, None)

    def evict(self) -> int:
        """Take the name off the idle block that was not used for longest, and give it for another use."""
        block = next(iter(self._idle))
        self.remove(block)
        return block

    def remove(self, block: int) -> None:
        """Take the name off a block."""
        del self._blocks[self._digests.pop(block)]
        self._idle.pop(block, None)

    def idle_blocks(self) -> list[int]:
        """Least recently used first."""
        return list(self._idle)

    def __repr__(self) -> str:
        return f"<PrefixTable {len(self)} blocks, {self.idle} idle>"
