"""A second process on the card: it owns a pool that others map, or maps theirs. It does what its parent asks.

Each message is [command, arguments…], each answer {"ok": …} or {"error": kind, "text": …}. See `Peer` for the commands.
"""

from __future__ import annotations

import threading
import time
import traceback
from typing import Any

import torch

from prelay_kv.cuda.copies import Copier
from prelay_kv.cuda.mapping import CudaMapping
from prelay_kv.cuda.pool import CudaPool
from prelay_kv.layout import KvLayout
from prelay_kv.ref import KvRef

from .lines import Answers
from .pattern import fill, wrong_blocks
from .pools import importer
from .rig import Rig


class Peer:
    """Commands are its methods."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._pool: CudaPool | None = None
        self._importer: Any = None
        self._copier = Copier(rig.runtime(), rig.index)
        self._stop = threading.Event()
        self._scribbler: threading.Thread | None = None
        self._scribbled = 0

    def export(self, owner: str, layout: dict[str, Any], seed: int) -> str:
        """Make a pool, fill all blocks by kernels; the reference to all of them."""
        place = str(self._rig.device)
        made = KvLayout.from_dict(layout)
        self._pool = CudaPool.create(owner, made, self._rig.runtime(), self._rig.index, torch_device=place)
        return self.refill(seed)

    def refill(self, seed: int) -> str:
        """Raise every generation, write over every block; the new reference."""
        assert self._pool is not None
        self._pool.generations[:] += 1
        fill(self._pool.tensor, seed)
        self._rig.wait()
        blocks = range(self._pool.layout.num_blocks)
        tokens = self._pool.layout.num_blocks * self._pool.layout.block_size
        return self._pool.ref(blocks, self._pool.generations, tokens).encode().decode()

    def overwrite(self, first: int) -> str:
        """Raise the generations of the blocks from `first` on, begin to write over them, and do not wait for that."""
        assert self._pool is not None
        self._pool.generations[first:] += 1
        for seed in range(self._rig.pick(200, 2)):
            fill(self._pool.tensor[first:], 1000 + seed)
        return "writing"

    def mapped(self) -> bool:
        assert self._pool is not None
        return self._pool.mapped()

    def close(self) -> str:
        assert self._pool is not None
        self._pool.close()
        return "closed"

    def fetch(self, reference: str, seed: int) -> dict[str, Any]:
        """Copy all blocks into memory of this process; which of them are not `seed`'s, and how long it took."""
        ref = KvRef.decode(reference.encode())
        self._importer = self._importer or importer(self._rig, ref.layout)
        target = torch.zeros(len(ref.blocks), *ref.layout.shape[1:], dtype=self._dtype(ref), device=self._rig.device)
        self._rig.wait()
        seconds: list[float] = []

        def copy(pool: torch.Tensor, blocks: tuple[int, ...]) -> None:
            for _ in range(3):
                began = time.perf_counter()
                self._copier.copy(
                    pool.data_ptr(), blocks, target.data_ptr(), range(len(blocks)), ref.layout.block_nbytes
                )
                seconds.append(time.perf_counter() - began)

        self._importer.fetch(ref, copy)
        wrong = wrong_blocks(target, ref.blocks, seed)
        return {"wrong": wrong, "seconds": min(seconds), "nbytes": target.nbytes, "mapping": self._about_mapping()}

    def _about_mapping(self) -> str:
        kept = [item.mapping for item in self._importer._open.values()]
        return ", ".join(sorted({"pinned" if getattr(each, "pinned", False) else type(each).__name__ for each in kept}))

    def scribble(self, reference: str) -> str:
        """From now on write over the blocks of a reference, through the mapping, until `rest`."""
        ref = KvRef.decode(reference.encode())
        place = str(self._rig.device)
        mapping = CudaMapping.open(ref, runtime=self._rig.runtime(), device=self._rig.index, torch_device=place)
        source = torch.full(
            (len(ref.blocks), *ref.layout.shape[1:]), 3.0, dtype=self._dtype(ref), device=self._rig.device
        )
        self._rig.wait()
        target = mapping.pool(ref).data_ptr()

        def work() -> None:
            numbers = range(len(ref.blocks))
            while not self._stop.is_set():
                self._copier.copy(source.data_ptr(), numbers, target, ref.blocks, ref.layout.block_nbytes)
                self._scribbled += 1
            mapping.close()

        self._stop.clear()
        self._scribbler = threading.Thread(target=work, daemon=True)
        self._scribbler.start()
        return "scribbling"

    def rest(self) -> int:
        """End that; how often it was done."""
        assert self._scribbler is not None
        self._stop.set()
        self._scribbler.join()
        return self._scribbled

    @staticmethod
    def _dtype(ref: KvRef) -> torch.dtype:
        return getattr(torch, ref.layout.dtype)  # type: ignore[no-any-return]


def main(kind: str, rehearse: bool) -> int:
    answers = Answers()
    rig = Rig.here(rehearse, lambda _: None)
    if kind == "memory":
        worker: Any = Peer(rig)
    else:
        from .worker import Worker

        worker = Worker(rig)
    answers.say({"ok": "ready"})
    for command, *arguments in answers.asked():
        try:
            answers.say({"ok": getattr(worker, command)(*arguments)})
        except Exception as error:
            traceback.print_exc()
            answers.say({"error": type(error).__name__, "text": str(error)})
    return 0
