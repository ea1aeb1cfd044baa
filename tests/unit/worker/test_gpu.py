"""What a worker makes on its GPU at its start, and what it leaves where that fails. Its life is in tests/faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from prelay_engine.geometry import Geometry
from prelay_engine.gpu.model import GpuModel
from prelay_kv.errors import CudaError, GpuTooSmall
from prelay_kv.segment import SHM_DIR
from prelay_queue.settings import QueueSettings
from prelay_worker import gpu
from prelay_worker.config import Role, WorkerConfig
from prelay_worker.gpu import Card
from tests.bed.cudart import FakeGpus, fake_gpus

OWNER = "start-of-a-gpu-worker"


class Weights:
    """What the pools need to know of a model."""

    geometry = Geometry(layers=1, kv_heads=1, head_dim=2, dtype=torch.float32)
    device = torch.device("cpu")

    def layout_hash(self, block_size: int) -> str:
        return f"layout {block_size}"

    def numerics_hash(self) -> str:
        return "numerics"


MODEL = cast(GpuModel, Weights())


@pytest.fixture
def gpus(tmp_path: Path) -> Iterator[FakeGpus]:
    with fake_gpus(tmp_path) as found:
        yield found


@pytest.fixture
def card(gpus: FakeGpus) -> Card:
    return Card(gpus.runtime, 0, "cpu")


def config(role: Role) -> WorkerConfig:
    return WorkerConfig(role, QueueSettings("redis://nowhere", "model"), None, 8, kv_transport="pinned")


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 70.00 GiB. GPU 0 has …")

    monkeypatch.setattr(torch, "empty", refuse)


@pytest.mark.usefixtures("full")
def test_a_card_without_room_for_the_pool_is_one_line_that_says_how_much(card: Card) -> None:
    room = r"on GPU 0, where 1024\.0 MiB of 1024\.0 MiB are free"
    with pytest.raises(GpuTooSmall, match=room):
        gpu._prefill(config(Role.PREFILL), MODEL, 8, card, OWNER)
    with pytest.raises(GpuTooSmall, match=room):
        gpu._decode(config(Role.DECODE), MODEL, 8, card)
    assert left() == []


def test_a_start_that_fails_after_the_host_pool_was_made_leaves_nothing_in_shared_memory(
    card: Card, gpus: FakeGpus
) -> None:
    gpus.set(fail="cudaHostRegister=700")
    with pytest.raises(CudaError):
        gpu._prefill(config(Role.PREFILL), MODEL, 8, card, OWNER)
    assert left() == []


def test_a_closed_worker_leaves_nothing_in_shared_memory(card: Card) -> None:
    _, transport = gpu._prefill(config(Role.PREFILL), MODEL, 8, card, OWNER)
    assert len(left()) == 1
    transport.close()
    assert left() == []


def left() -> list[str]:
    return [path.name for path in SHM_DIR.glob(f"prelay-{OWNER}-*.kv")]
