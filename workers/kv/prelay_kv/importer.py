"""Taking over a peer's blocks: map once, copy, and only then believe."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .errors import LayoutMismatch, NoAccess, SegmentGone, StaleKv, StillMapped
from .mapping import PeerMapping, ShmMapping
from .ref import KvRef
from .segment import SHM_DIR, Segment

#: Called with the peer's pool and the block ids; the copy has ended (a GPU's stream synchronised) when it returns.
Copy = Callable[[torch.Tensor, tuple[int, ...]], None]

#: Opens the segment of a reference, or raises SegmentGone or BadKvRef.
Opener = Callable[[KvRef], PeerMapping]


@dataclass(slots=True)
class _Open:
    """A mapping, None until it is open, and who opens it or copies from it. A lost one is closed by the last of them.

    `opening` is held by who opens it: so nothing is mapped twice.
    """

    mapping: PeerMapping | None = None
    users: int = 0
    lost: bool = False
    opening: threading.Lock = field(default_factory=threading.Lock)


class Importer:
    """Reads KV blocks of the peers of one KV domain. Safe to use from several threads.

    Nobody waits for a mapping but who wants to copy from it: to pin one can take seconds, and `owners`, `orphans` and
    `forget` are for a thread that has leases to renew.

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
        item = self._take(ref)
        try:
            mapping = self._mapped(item, ref)  # 2
            copy(mapping.pool(ref), ref.blocks)  # 3
            now = mapping.generations(ref.blocks)  # 4
        finally:
            self._give_back(_key(ref), item)
        if now != ref.generations:
            raise StaleKv(tuple(b for b, old, new in zip(ref.blocks, ref.generations, now, strict=True) if old != new))

    def owners(self) -> frozenset[str]:
        """The peers whose memory this process keeps mapped. Forget those that no longer live: a mapping pins memory."""
        with self._lock:
            return frozenset(owner for owner, _ in self._open)

    def orphans(self) -> frozenset[str]:
        """Those of `owners` that are dead, as their files' locks say: nobody need wait for a heartbeat to expire."""
        with self._lock:
            return frozenset(
                key[0] for key, item in self._open.items() if item.mapping is not None and item.mapping.is_orphaned()
            )

    def forget(self, owner: str) -> None:
        """Unmap a lost peer's segments, each as soon as no copy runs on it. Does not wait for those.

        A later `fetch` of the same owner maps again, if the file is still there: what a dead worker left is as good
        as before until its generations say otherwise.
        """
        with self._lock:
            unused = self._drop([key for key in self._open if key[0] == owner])
        _close(unused)

    def close(self) -> None:
        """Forget all peers and refuse further fetches (SegmentGone). Does not wait for running copies."""
        with self._lock:
            self._closed = True
            unused = self._drop(list(self._open))
        _close(unused)

    def _check(self, segment: Segment) -> None:
        if segment.node != self._domain:
            raise SegmentGone(f"{segment.handle:.100} lies in KV domain {segment.node:.40}, this is {self._domain}")
        if segment.kind not in self._openers:
            raise NoAccess(f"no transport for segments of kind {segment.kind:.40} here")
        if segment.layout_hash != self._layout_hash:
            raise LayoutMismatch("layout", segment.layout_hash, self._layout_hash)
        if self._numerics_hash is not None and segment.numerics_hash != self._numerics_hash:
            raise LayoutMismatch("numerics", segment.numerics_hash, self._numerics_hash)

    def _take(self, ref: KvRef) -> _Open:
        with self._lock:
            if self._closed:
                raise SegmentGone("this importer is closed")
            item = self._open.setdefault(_key(ref), _Open())
            item.users += 1
            return item

    def _mapped(self, item: _Open, ref: KvRef) -> PeerMapping:
        with item.opening:
            if item.mapping is None:
                item.mapping = self._open_segment(ref)
            return item.mapping

    def _open_segment(self, ref: KvRef) -> PeerMapping:
        opener = self._openers[ref.segment.kind]
        try:
            return opener(ref)
        except StillMapped as error:  # it is dead, and nobody has told us yet: two live ones have not the same handle
            self.forget(error.owner)
            return opener(ref)

    def _give_back(self, key: tuple[str, str], item: _Open) -> None:
        with self._lock:
            item.users -= 1
            if item.users:
                return
            if item.mapping is None and not item.lost:  # it could not be opened
                del self._open[key]
            unused = [item.mapping] if item.mapping is not None and item.lost else []
        _close(unused)

    def _drop(self, keys: Iterable[tuple[str, str]]) -> list[PeerMapping]:
        """Under the lock. The mappings that nobody uses: the caller closes them, once the lock is free."""
        unused = []
        for key in keys:
            item = self._open.pop(key)
            item.lost = True
            if item.mapping is not None and not item.users:
                unused.append(item.mapping)
        return unused


def _key(ref: KvRef) -> tuple[str, str]:
    """By owner too: a handle of a later incarnation may look the same and be other memory."""
    return ref.segment.owner, ref.segment.handle


def _close(mappings: Iterable[PeerMapping]) -> None:
    """All of them, also where one fails."""
    with ExitStack() as all_of_them:
        for mapping in mappings:
            all_of_them.callback(mapping.close)
