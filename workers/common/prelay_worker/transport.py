"""How the KV of the real model leaves a worker and reaches another: in host memory, and what GPUs share with it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

from prelay_engine.contiguous import ContiguousKv
from prelay_engine.kv import PagedKv
from prelay_engine.model import Model
from prelay_kv.errors import BadKvRef, CudaError, KvError, LayoutMismatch, NoAccess
from prelay_kv.importer import Importer
from prelay_kv.layout import KvLayout
from prelay_kv.ref import KvRef
from prelay_kv.segment import SHM_DIR, Segment, domain
from prelay_kv.shm import sweep
from prelay_queue import failpoints

from .backend import Transport
from .config import WorkerConfig
from .errors import DeviceBroken, HandoverBlocked, HandoverBroken, HandoverStale

log = logging.getLogger("prelay.real")


class Exported(Protocol):
    """A pool that others can map; see `prelay_kv.shm.ShmPool`."""

    segment: Segment

    def ref(self, blocks: Iterable[int], generations: Iterable[int], tokens: int) -> KvRef: ...
    def close(self) -> None: ...


class PoolExport(Transport):
    """The prefill side: its pool lies where others can map it, so an export is only a description."""

    def __init__(self, pool: Exported, kv: PagedKv) -> None:
        self.domain = pool.segment.node
        self._pool = pool
        self._kv = kv

    def export(self, key: str, tokens: int) -> bytes:
        blocks, generations = self._kv.export(key)
        return self._pool.ref(blocks, generations, tokens).encode()

    def close(self) -> None:
        self._pool.close()


class PeerImport(Transport):
    """The decode side: maps the exporter's pool and copies out of it, each kind of memory in its own way."""

    def __init__(self, importer: Importer, domain_: str) -> None:
        self.domain = domain_
        self._importer = importer

    def fetch(self, kv: bytes, key: str, tokens: int) -> None:
        try:
            ref = KvRef.decode(kv)
            if ref.tokens != tokens:
                raise HandoverBroken(f"the export holds {ref.tokens} positions, the job has {tokens}")
            self._importer.fetch(ref, lambda pool, blocks: self._copy(key, pool, blocks, tokens))
        except (BadKvRef, LayoutMismatch) as error:
            raise HandoverBroken(str(error)) from None
        except CudaError as error:
            raise (DeviceBroken if error.fatal else HandoverBlocked)(str(error)) from None
        except NoAccess as error:
            raise HandoverBlocked(str(error)) from None
        except KvError as error:
            raise HandoverStale(str(error)) from None

    def _copy(self, key: str, pool: torch.Tensor, blocks: tuple[int, ...], tokens: int) -> None:
        """Copy positions 0 … tokens-1 into the memory of `key`, and return when they are there."""
        raise NotImplementedError

    def forget(self, owner: str) -> None:
        self._importer.forget(owner)

    def orphans(self) -> frozenset[str]:
        return self._importer.orphans()

    def peers(self) -> frozenset[str]:
        return self._importer.owners()

    def close(self) -> None:
        self._importer.close()


class HostImport(PeerImport):
    """From host memory into buffers in host memory."""

    def __init__(self, importer: Importer, kv: ContiguousKv, domain_: str) -> None:
        super().__init__(importer, domain_)
        self._kv = kv

    def _copy(self, key: str, pool: torch.Tensor, blocks: tuple[int, ...], tokens: int) -> None:
        failpoints.hit("copy.before")
        self._kv.import_blocks(key, _blocks_of(pool, blocks), tokens)
        failpoints.hit("copy.after")


def _blocks_of(pool: torch.Tensor, blocks: tuple[int, ...]) -> Iterator[torch.Tensor]:
    for number, block in enumerate(blocks):
        if number == 1:  # the first is copied: whoever takes one block at a time asks for the next only then
            failpoints.hit("copy.middle")
        yield pool[block]


class NoTransport(Transport):
    """A unified worker keeps what it prefills."""

    def __init__(self) -> None:
        self.domain = domain()


def kv_layout(config: WorkerConfig, model: Model, blocks: int) -> KvLayout:
    """How a pool of so many blocks lies in memory, and which others have blocks like these."""
    shape = model.geometry
    return KvLayout(
        num_blocks=blocks,
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        block_size=config.block_size,
        head_dim=shape.head_dim,
        dtype=str(shape.dtype).removeprefix("torch."),
        layout_hash=model.layout_hash(config.block_size),
        numerics_hash=model.numerics_hash(),
    )


def sweep_dead() -> None:
    """Remove what dead workers left in shared memory: its room may be needed."""
    if gone := sweep(SHM_DIR):
        log.info("removed KV segments of dead workers: %s", ", ".join(gone))
