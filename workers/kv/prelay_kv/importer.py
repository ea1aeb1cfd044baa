"""Taking over a peer's blocks: map once, copy, and only then believe."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from .errors import LayoutMismatch, SegmentGone, StaleKv, StillMapped
from .mapping import PeerMapping, ShmMapping
from .ref import KvRef
from .segment import SHM_DIR, Segment

#: Called with the peer's pool and the block ids; the copy has ended (a GPU's stream synchronised) when it returns.
Copy = Callable[[torch.Tensor, tuple[int, ...]], None]

#: Opens the segment of a reference, or raises SegmentGone or BadKvRef.
Opener = Callable[[KvRef], PeerMapping]


@dataclass(slots=True)
class _Open:
    """A mapping and the copies that run on it. A lost one is closed by the last of them."""

    mapping: PeerMapping
    users: int = 0
    lost: bool = False


class Importer:
    """Reads KV blocks of the peers of one KV domain. Safe to use from several threads.

    With `numerics_hash` None peers with other numerics are read too: their KV fits, and is not promised bit for bit.
    `openers` names the transports beside shared memory, by kind of segment.
    """

    def __init__(
        self,
        layout_hash: str,
        numerics_hash: str | None,
        domain: str,
        shm_dir: Path = SHM_DIR,
        openers: dict[str, Opener] | None = None,
    ) -> None:
        self._layout_hash = layout_hash
        self._numerics_hash = numerics_hash
        self._domain = domain
        self._openers: dict[str, Opener] = {"shm": functools.partial(ShmMapping.open, shm_dir=shm_dir)}
        self._openers.update(openers or {})
        self._open: dict[tuple[str, str], _Open] = {}
        self._closed = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        with self._lock:
            busy = sum(item.users for item in self._open.values())
            return f"Importer({len(self._open)} segments mapped, {busy} copies running)"

    def fetch(self, ref: KvRef, copy: Copy) -> None:
        """Copy the blocks of `ref` by `copy`, and return only when what was copied is what `ref` promised.

        1. Refuse what could not fit: another domain, layout or numerics (SegmentGone, LayoutMismatch).
        2. Map the segment, or use the mapping that is there (SegmentGone, BadKvRef).
        3. Copy. The mapping stays until the copy has ended, also when its owner is forgotten meanwhile.
        4. Read the generations, after the copy: if one differs the block was reused, and the bytes mean nothing
           (StaleKv).

        On any error, `copy`'s own included, the copied bytes must not be used.
        """
        self._check(ref.segment)  # 1
        item = self._take(ref)  # 2
        try:
            copy(item.mapping.pool(ref), ref.blocks)  # 3
            now = item.mapping.generations(ref.blocks)  # 4
        finally:
            self._give_back(item)
        if now != ref.generations:
            raise StaleKv(tuple(b for b, old, new in zip(ref.blocks, ref.generations, now, strict=True) if old != new))

    def owners(self) -> frozenset[str]:
        """The peers whose memory this process keeps mapped. Forget those that no longer live: a mapping pins memory."""
        with self._lock:
            return frozenset(owner for owner, _ in self._open)

    def orphans(self) -> frozenset[str]:
        """Those of `owners` that are dead, as their files' locks say: nobody need wait for a heartbeat to expire."""
        with self._lock:
            return frozenset(key[0] for key, item in self._open.items() if item.mapping.is_orphaned())

    def forget(self, owner: str) -> None:
        """Unmap a lost peer's segments, each as soon as no copy runs on it. Does not wait.

        A later `fetch` of the same owner maps again, if the file is still there: what a dead worker left is as good
        as before until its generations say otherwise.
        """
        with self._lock:
            self._drop_owner(owner)

    def close(self) -> None:
        """Forget all peers and refuse further fetches (SegmentGone). Does not wait for running copies."""
        with self._lock:
            self._closed = True
            for key in list(self._open):
                self._drop(key)

    def _check(self, segment: Segment) -> None:
        if segment.node != self._domain:
            raise SegmentGone(f"{segment.handle:.100} lies in KV domain {segment.node:.40}, this is {self._domain}")
        if segment.kind not in self._openers:
            raise SegmentGone(f"no transport for segments of kind {segment.kind:.40} here")
        if segment.layout_hash != self._layout_hash:
            raise LayoutMismatch("layout", segment.layout_hash, self._layout_hash)
        if self._numerics_hash is not None and segment.numerics_hash != self._numerics_hash:
            raise LayoutMismatch("numerics", segment.numerics_hash, self._numerics_hash)

    def _take(self, ref: KvRef) -> _Open:
        # Keyed by owner too: a handle of a later incarnation may look the same and be other memory.
        key = (ref.segment.owner, ref.segment.handle)
        with self._lock:
            if self._closed:
                raise SegmentGone("this importer is closed")
            item = self._open.get(key)
            if item is None:  # opened under the lock, so that `forget` sees it and nothing is mapped twice
                item = self._open[key] = _Open(self._open_segment(ref))
            item.users += 1
            return item

    def _open_segment(self, ref: KvRef) -> PeerMapping:
        opener = self._openers[ref.segment.kind]
        try:
            return opener(ref)
        except StillMapped as error:  # it is dead, and nobody has told us yet: two live ones have not the same handle
            self._drop_owner(error.owner)
            return opener(ref)

    def _give_back(self, item: _Open) -> None:
        with self._lock:
            item.users -= 1
            if item.lost and not item.users:
                item.mapping.close()

    def _drop_owner(self, owner: str) -> None:
        for key in [key for key in self._open if key[0] == owner]:
            self._drop(key)

    def _drop(self, key: tuple[str, str]) -> None:
        item = self._open.pop(key)
        item.lost = True
        if not item.users:
            item.mapping.close()
