"""The real model on a GPU behind `EngineLike` and `Transport`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from prelay_engine.blocks import BlockPool
from prelay_engine.config import EngineConfig
from prelay_engine.engine import Engine
from prelay_engine.gpu.capture import TorchCapture
from prelay_engine.gpu.loading import load_on_gpu
from prelay_engine.gpu.model import GpuModel
from prelay_engine.gpu.sizing import LargestStep, kv_blocks
from prelay_engine.kv import PagedKv
from prelay_kv.cuda.copies import Copier
from prelay_kv.cuda.mapping import CudaMapping
from prelay_kv.cuda.mirror import Mirror, PinnedMapping
from prelay_kv.cuda.paths import CUDA_IPC
from prelay_kv.cuda.pool import CudaPool
from prelay_kv.cuda.probe import choose_path
from prelay_kv.cuda.runtime import Cudart
from prelay_kv.errors import GpuTooSmall
from prelay_kv.importer import Importer, Opener
from prelay_kv.segment import SHM_DIR, domain
from prelay_kv.shm import ShmPool
from prelay_queue import failpoints

from .backend import Transport
from .config import Role, WorkerConfig
from .transport import NoTransport, PeerImport, PoolExport, kv_layout, sweep_dead

log = logging.getLogger("prelay.real")


@dataclass(frozen=True, slots=True)
class Card:
    """The GPU of this worker: CUDA's runtime, the device's number in it, and what torch calls it."""

    runtime: Cudart
    index: int
    torch_device: str


class MirrorExport(PoolExport):
    """The prefill side where GPUs cannot map each other's memory: finished blocks are copied to pinned host memory."""

    def __init__(self, pool: ShmPool, kv: PagedKv, mirror: Mirror) -> None:
        super().__init__(pool, kv)
        self._mirror = mirror

    def export(self, key: str, tokens: int) -> bytes:
        blocks, generations = self._kv.export(key)
        self._mirror.copy(blocks, generations)
        return self._pool.ref(blocks, generations, tokens).encode()

    def close(self) -> None:
        self._mirror.close()
        super().close()


class GpuImport(PeerImport):
    """The decode side: copies a peer's blocks, from its GPU or from pinned host memory, into blocks of its own."""

    def __init__(self, importer: Importer, kv: PagedKv, copier: Copier, domain_: str) -> None:
        super().__init__(importer, domain_)
        self._kv, self._copier = kv, copier
        self._block_nbytes = kv.geometry.block_bytes(kv.block_size)

    def _copy(self, key: str, pool: torch.Tensor, blocks: tuple[int, ...], tokens: int) -> None:  # noqa: ARG002
        """Whole blocks: what lies in the last one beyond the last position is never read."""
        failpoints.hit("copy.before")
        mine = self._kv.pool.blocks(key)[: len(blocks)]
        assert len(mine) == len(blocks)
        first = 1 if failpoints.armed() else len(blocks)
        self._copy_some(pool, blocks[:first], mine[:first])
        if first < len(blocks):
            failpoints.hit("copy.middle")
            self._copy_some(pool, blocks[first:], mine[first:])
        failpoints.hit("copy.after")

    def _copy_some(self, pool: torch.Tensor, there: Sequence[int], here: Sequence[int]) -> None:
        self._copier.copy(pool.data_ptr(), there, self._kv.tensor.data_ptr(), here, self._block_nbytes)

    def close(self) -> None:
        super().close()
        self._copier.close()


def gpu_engine(config: WorkerConfig, engine_config: EngineConfig, worker: str) -> tuple[Engine, Transport, GpuModel]:
    """Load the model onto its card, take the card's memory for KV, and open the transport of the role."""
    assert engine_config.gpu is not None
    model = load_on_gpu(engine_config)
    decodes = config.role is not Role.PREFILL
    blocks = _blocks(config, engine_config, model, decodes=decodes)
    card = _card(model)
    if config.role is Role.PREFILL:
        kv, transport = _prefill(config, model, blocks, card, worker)
    else:
        kv, transport = _decode(config, model, blocks, card)
        captures = engine_config.gpu.graphs and model.graphable and model.device.type == "cuda"
        model.decode_from(kv, config.max_running, TorchCapture(model.device) if captures else None)
    return Engine(model, kv, engine_config), transport, model


def _blocks(config: WorkerConfig, engine_config: EngineConfig, model: GpuModel, *, decodes: bool) -> int:
    """As many as were asked for, or as fit. Either way a step has run, so that no kernel is compiled for a request."""
    if not config.kv_blocks:
        return kv_blocks(model, engine_config, decodes=decodes)
    if model.device.type == "cuda":
        LargestStep(model, config.block_size)(2 * config.block_size, 1)
    return config.kv_blocks


def _card(model: GpuModel) -> Card:
    return Card(Cudart.find(), model.device.index or 0, str(model.device))


def _prefill(config: WorkerConfig, model: GpuModel, blocks: int, card: Card, worker: str) -> tuple[PagedKv, Transport]:
    sweep_dead()
    layout = kv_layout(config, model, blocks)
    path = choose_path(config.kv_transport, card.runtime, card.index)
    log.info("KV is handed over by %s: %s", path.kind, path.reason)
    if path.kind == CUDA_IPC:
        pool = CudaPool.create(worker, layout, card.runtime, card.index, SHM_DIR, card.torch_device)
        kv = _store(config, model, BlockPool(blocks, pool.generations), pool.tensor)
        return kv, PoolExport(pool, kv)
    tensor = _pool(model, layout.shape, card)
    with ExitStack() as undo:
        host = ShmPool.create(worker, layout)
        undo.callback(host.close)
        kv = _store(config, model, BlockPool(blocks, host.generations), tensor)
        transport = MirrorExport(host, kv, Mirror(tensor, host, card.runtime, card.index))
        undo.pop_all()
        return kv, transport


def _decode(config: WorkerConfig, model: GpuModel, blocks: int, card: Card) -> tuple[PagedKv, Transport]:
    shape = (blocks, *model.geometry.block_shape(config.block_size))
    kv = _store(config, model, BlockPool(blocks), _pool(model, shape, card))
    if config.role is Role.UNIFIED:
        return kv, NoTransport()
    here = domain()
    openers: dict[str, Opener] = {
        "cuda_ipc": partial(
            CudaMapping.open, runtime=card.runtime, device=card.index, torch_device=card.torch_device, shm_dir=SHM_DIR
        ),
        "shm": partial(PinnedMapping.open, runtime=card.runtime, device=card.index, shm_dir=SHM_DIR),
    }
    importer = Importer(model.layout_hash(config.block_size), None, here, openers=openers)
    return kv, GpuImport(importer, kv, Copier(card.runtime, card.index), here)


def _store(config: WorkerConfig, model: GpuModel, pool: BlockPool, tensor: torch.Tensor) -> PagedKv:
    return PagedKv(model.geometry, pool, config.block_size, tensor, config.keeps_prefixes)


def _pool(model: GpuModel, shape: tuple[int, ...], card: Card) -> torch.Tensor:
    """Blocks of this worker's own, whatever lies in them. GpuTooSmall when the card has no room."""
    try:
        return torch.empty(shape, dtype=model.geometry.dtype, device=model.device)
    except torch.OutOfMemoryError:
        card.runtime.set_device(card.index)
    nbytes = prod(shape) * model.geometry.dtype.itemsize
    raise GpuTooSmall(f"GPU {card.index}", nbytes, *card.runtime.memory())
