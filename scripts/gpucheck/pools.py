"""Pools and importers of the checks."""

from __future__ import annotations

from functools import partial

from prelay_kv.cuda.mapping import CudaMapping
from prelay_kv.cuda.mirror import PinnedMapping
from prelay_kv.importer import Importer, Opener
from prelay_kv.layout import KvLayout
from prelay_kv.segment import domain

from .rig import Rig


def layout(rig: Rig, nbytes: int) -> KvLayout:
    """Of a pool of at most so many bytes, and of at least four blocks: those of an 8B model, of 2 MiB each."""
    layers, heads, dim = rig.pick((32, 8, 128), (2, 2, 16))
    block = KvLayout(1, layers, heads, 16, dim, str(rig.half).removeprefix("torch."), "1a2b", "3c4d")
    return KvLayout(
        max(4, nbytes // block.block_nbytes),
        layers,
        heads,
        16,
        dim,
        block.dtype,
        block.layout_hash,
        block.numerics_hash,
    )


def importer(rig: Rig, of: KvLayout) -> Importer:
    """For pools on the card and for those in pinned memory."""
    runtime, device = rig.runtime(), rig.index
    openers: dict[str, Opener] = {
        "cuda_ipc": partial(CudaMapping.open, runtime=runtime, device=device, torch_device=str(rig.device)),
        "shm": partial(PinnedMapping.open, runtime=runtime, device=device),
    }
    return Importer(of.layout_hash, of.numerics_hash, domain(), openers=openers)
