"""Which GPU each worker computes on, and how much of its memory it takes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .settings import Settings

if TYPE_CHECKING:
    from prelay_engine.config import GpuConfig

#: Shares of prefill and decode workers of what they have together on one card. Each holds a copy of the weights. Beyond
#: those a prompt's blocks stay for a moment and an answer's until its end: room for KV is what limits decoding.
PREFILL_SHARE, DECODE_SHARE = 0.35, 0.65


@dataclass(frozen=True, slots=True)
class Place:
    """A GPU, and the share of its memory that one worker takes."""

    role: str
    gpu: int
    share: float = 0.0

    def variables(self) -> dict[str, str]:
        """Return what the worker's process is told."""
        return {"PRELAY_GPU": str(self.gpu), "PRELAY_GPU_MEMORY_UTILIZATION": f"{self.share:.4f}"}


def places(settings: Settings) -> Mapping[str, Place]:
    """Return the place of each worker that `prelay serve` starts, by name; none where they compute on CPUs."""
    if not settings.on_gpus:
        return {}
    found: dict[str, Place] = {}
    for role, count, listed in zip(
        ("prefill", "decode", "unified"),
        settings.counts(),
        (settings.prefill_gpus, settings.decode_gpus, settings.decode_gpus),
        strict=True,
    ):
        gpus = [int(part) for part in listed.split(",")]
        found |= {f"{role}-{number}": Place(role, gpus[number % len(gpus)]) for number in range(count)}
    return {name: _shared(place, found, settings.gpu_memory_utilization) for name, place in found.items()}


def _shared(place: Place, all_places: Mapping[str, Place], utilization: float) -> Place:
    """Those of one card take `utilization` of it together.

    In equal shares; prefill and decode workers beside each other as PREFILL_SHARE to DECODE_SHARE.
    """
    counts = Counter(other.role for other in all_places.values() if other.gpu == place.gpu)
    share = 1 / counts.total()
    prefill, decode = counts["prefill"], counts["decode"]
    if place.role in ("prefill", "decode") and prefill and decode:
        pair = (prefill + decode) / counts.total()
        share = pair * (PREFILL_SHARE / prefill if place.role == "prefill" else DECODE_SHARE / decode)
    return Place(place.role, place.gpu, utilization * share)


def gpu_config(settings: Settings) -> GpuConfig | None:
    """Return how the one worker of this process uses its GPU; None: it computes on the CPU."""
    if not settings.on_gpus:
        return None
    from prelay_engine.config import GpuConfig

    return GpuConfig(
        device=f"cuda:{settings.gpu}",
        memory_utilization=settings.gpu_memory_utilization,
        exact=settings.exact == "on",
        graphs=settings.cuda_graphs == "on",
    )
