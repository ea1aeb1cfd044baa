"""The real model behind `EngineLike` and `Transport`: what a worker with torch builds at its start."""

from __future__ import annotations

import logging
from collections.abc import Callable
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
from prelay_kv.errors import KvError
from prelay_kv.importer import Importer
from prelay_kv.segment import domain
from prelay_kv.shm import ShmPool

from .backend import Backend, Transport
from .config import Role, WorkerConfig
from .errors import StartupError
from .transport import HostImport, NoTransport, PoolExport, kv_layout, sweep_dead

log = logging.getLogger("prelay.real")

Build = Callable[[WorkerConfig, EngineConfig, str], tuple[Engine, Transport, Model]]


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
        num_blocks=max(1, config.kv_blocks),  # on a GPU 0: as many as fit, which is seen later
        max_running=config.max_running,
        prefill_chunk=config.prefill_chunk,
        batch_step_ms=config.batch_step_ms,
        max_model_len=config.max_model_len,
        threads=config.threads,
        kernels=cast(KernelsChoice, config.kernels),
        quantization=cast(Quantization, config.quantization),
        gpu=config.gpu,
    )
    torch.set_num_interop_threads(1)
    build: Build = _on_cpu
    if config.gpu is not None:
        from .gpu import gpu_engine as build  # needs Triton
    engine, transport, model = build(config, engine_config, worker)
    log.info("%r: %s; %s", model, model.how, model.exactness)
    detail = {
        "dtype": str(model.geometry.dtype).removeprefix("torch."),
        "exact": str(model.exact).lower(),
        "kernels": model.how,
        "layout": model.layout_hash(config.block_size),
        "numerics": model.numerics_hash(),
    }
    blocks = engine.stats().total
    return Backend(engine, transport, config.block_size, blocks, model.context_len, config.model.name, detail)


def _on_cpu(config: WorkerConfig, engine_config: EngineConfig, worker: str) -> tuple[Engine, Transport, Model]:
    model = load(engine_config)
    if config.role is Role.PREFILL:
        return *_prefill(config, engine_config, model, worker), model
    return *_decode(config, engine_config, model), model


def _prefill(config: WorkerConfig, engine_config: EngineConfig, model: Model, worker: str) -> tuple[Engine, Transport]:
    sweep_dead()
    pool = ShmPool.create(worker, kv_layout(config, model, config.kv_blocks))
    blocks = BlockPool(config.kv_blocks, pool.generations)
    kv = PagedKv(model.geometry, blocks, config.block_size, pool.tensor, config.keeps_prefixes)
    return Engine(model, kv, engine_config), PoolExport(pool, kv)


def _decode(config: WorkerConfig, engine_config: EngineConfig, model: Model) -> tuple[Engine, Transport]:
    kv = ContiguousKv(model.geometry, BlockPool(config.kv_blocks), config.block_size, config.keeps_prefixes)
    engine = Engine(model, kv, engine_config)
    if config.role is Role.UNIFIED:
        return engine, NoTransport()
    here = domain()
    # Other thread counts, say: such KV fits. Only its exactness is not promised (docs/design.md, section 11).
    importer = Importer(model.layout_hash(config.block_size), None, here)
    return engine, HostImport(importer, kv, here)
