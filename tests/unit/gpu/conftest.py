"""Tiny models on a device that is this CPU: kernels run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from prelay_engine import loading
from prelay_engine.config import EngineConfig, GpuConfig
from prelay_engine.gpu.loading import load_on_gpu
from prelay_engine.gpu.model import GpuModel
from prelay_engine.model import Model
from tests.unit.engine.conftest import MakeFolder, tiny_folder

__all__ = ["tiny_folder"]

LoadGpu = Callable[..., GpuModel]
LoadCpu = Callable[[str], Model]


@pytest.fixture(scope="session")
def on_gpu(tiny_folder: MakeFolder) -> LoadGpu:
    """kind, exact → a loaded model of two layers, one of each."""

    @cache
    def load(kind: str = "llama", exact: bool = True) -> GpuModel:
        return load_on_gpu(gpu_config(tiny_folder(kind, num_hidden_layers=2), exact))

    return load


@pytest.fixture(scope="session")
def on_cpu(tiny_folder: MakeFolder) -> LoadCpu:
    """kind → the same weights, as the CPU computes them."""

    @cache
    def load(kind: str) -> Model:
        return loading.load(EngineConfig(model=tiny_folder(kind, num_hidden_layers=2), dtype="float32"))

    return load


def gpu_config(folder: Path, exact: bool) -> EngineConfig:
    return EngineConfig(model=folder, dtype="float32", gpu=GpuConfig(device="cpu", exact=exact))
