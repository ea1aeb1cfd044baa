"""The real model behind `EngineLike` and `Transport`: what a worker with torch builds at its start."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import cast

import torch

from prelay_engine.blocks import BlockPool
from prelay_engine.config import DType, EngineConfig, KernelsChoice, Quantization
from prelay_engine.contiguous import ContiguousKv
from prelay_engine.engine import Engine
from prelay_engine.errors import EngineError
from prelay_engine.kv import PagedKv
from prelay_engine.loading import load
from prelay_engine.model import Model
from prelay_kv.errors import BadKvRef, KvError, LayoutMismatch
from prelay_kv.importer import Importer
from prelay_kv.layout import KvLayout
from prelay_kv.ref import KvRef
from prelay_kv.segment import SHM_DIR, domain
from prelay_kv.shm import ShmPool, sweep
from prelay_queue import failpoints

from .backend import Backend, Transport
from .config import Role, WorkerConfig
from .errors import HandoverBroken, HandoverStale, StartupError

log = logging.getLogger("prelay.real")


class ShmExport(Transport):
    """The prefill side: its pool lies in shared memory, so an export is only a description."""

    def __init__(self, pool: ShmPool, kv: PagedKv) -> None:
        self.domain = pool.segment.node
        self._pool = pool
        self._kv = kv

    def export(self, key: str, tokens: int) -> bytes:
        blocks, generations = self._kv.export(key)
        return self._pool.ref(blocks, generations, tokens).encode()

    def close(self) -> None:
        self._pool.close()


class ShmImport(Transport):
    """The decode side: maps the exporter's pool read only and copies what it lacks."""

    def __init__(self, importer: Importer, kv: ContiguousKv, domain_: str) -> None:
        self.domain = domain_
        self._importer = importer
        self._kv = kv

    def fetch(self, kv: bytes, key: str, tokens: int) -> None:
        try:
            ref = KvRef.decode(kv)
            if ref.tokens != tokens:
                raise HandoverBroken(f"the export holds {ref.tokens} positions, the job has {tokens}")
            self._importer.fetch(ref, lambda pool, blocks: self._copy(key, pool, blocks, tokens))
        except (BadKvRef, LayoutMismatch) as error:
            raise HandoverBroken(str(error)) from None
        except KvError as error:
            raise HandoverStale(str(error)) from None

    def _copy(self, key: str, pool: torch.Tensor, blocks: tuple[int, ...], tokens: int) -> None:
        failpoints.hit("copy.before")
        self._kv.import_blocks(key, _blocks_of(pool, blocks), tokens)
        failpoints.hit("copy.after")

    def forget(self, owner: str) -> None:
        self._importer.forget(owner)

    def peers(self) -> frozenset[str]:
        return self._importer.owners()

    def close(self) -> None:
        self._importer.close()


def _blocks_of(pool: torch.Tensor, blocks: tuple[int, ...]) -> Iterator[torch.Tensor]:
    for number, block in enumerate(blocks):
        if number == 1:  # the first is copied: whoever takes one block at a time asks for the next only then
            failpoints.hit("copy.middle")
        yield pool[block]


class NoTransport(Transport):
    """A unified worker keeps what it prefills."""

    def __init__(self) -> None:
        self.domain = domain()


def real_backend(config: WorkerConfig, worker: str) -> Backend:
    """Load the model, make the pool of this role and the transport to it. Raise StartupError with one clear line."""
    try:
        return _build(config, worker)
    except (EngineError, KvError, OSError) as error:
        raise StartupError(str(error)) from None


def _build(config: WorkerConfig, worker: str) -> Backend:
    assert config.model is not None, "the caller resolves the model"
    engine_config = EngineConfig(
        model=config.model,
        dtype=cast(DType, config.dtype),
        block_size=config.block_size,
        num_blocks=config.kv_blocks,
        max_running=config.max_running,
        prefill_chunk=config.prefill_chunk,
        batch_step_ms=config.batch_step_ms,
        max_model_len=config.max_model_len,
        threads=config.threads,
        kernels=cast(KernelsChoice, config.kernels),
        quantization=cast(Quantization, config.quantization),
    )
    torch.set_num_interop_threads(1)
    model = load(engine_config)
    log.info("%r: %s; %s", model, model.how, model.exactness)
    if config.role is Role.PREFILL:
        engine, transport = _prefill(config, engine_config, model, worker)
    else:
        engine, transport = _decode(config, engine_config, model)
    detail = {
        "dtype": str(model.geometry.dtype).removeprefix("torch."),
        "exact": str(model.exact).lower(),
        "kernels": model.how,
        "layout": model.layout_hash(config.block_size),
        "numerics": model.numerics_hash(),
    }
    return Backend(engine, transport, config.block_size, model.context_len, config.model.name, detail)


def _prefill(config: WorkerConfig, engine_config: EngineConfig, model: Model, worker: str) -> tuple[Engine, Transport]:
    if swept := sweep(SHM_DIR):
        log.info("removed KV segments of dead workers: %s", ", ".join(swept))
    pool = ShmPool.create(worker, _layout(config, model))
    blocks = BlockPool(config.kv_blocks, pool.generations)
    kv = PagedKv(model.geometry, blocks, config.block_size, pool.tensor, config.prefix_cache)
    return Engine(model, kv, engine_config), ShmExport(pool, kv)


def _decode(config: WorkerConfig, engine_config: EngineConfig, model: Model) -> tuple[Engine, Transport]:
    # What was prefilled elsewhere is copied whole: from a cache of our own it would come no faster (docs/design.md,
    # section 11).
    prefills = config.role is Role.UNIFIED or config.local_prefill_tokens > 0
    prefix_cache = config.prefix_cache and prefills
    kv = ContiguousKv(model.geometry, BlockPool(config.kv_blocks), config.block_size, prefix_cache)
    engine = Engine(model, kv, engine_config)
    if config.role is Role.UNIFIED:
        return engine, NoTransport()
    here = domain()
    # Other thread counts, say: such KV fits. Only its exactness is not promised (docs/design.md, section 11).
    importer = Importer(model.layout_hash(config.block_size), None, here)
    return engine, ShmImport(importer, kv, here)


def _layout(config: WorkerConfig, model: Model) -> KvLayout:
    shape = model.geometry
    return KvLayout(
        num_blocks=config.kv_blocks,
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        block_size=config.block_size,
        head_dim=shape.head_dim,
        dtype=str(shape.dtype).removeprefix("torch."),
        layout_hash=model.layout_hash(config.block_size),
        numerics_hash=model.numerics_hash(),
    )
