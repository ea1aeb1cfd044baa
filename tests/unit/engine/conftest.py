"""Tiny random models of real architectures, written as folders the way a user would have them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from prelay_engine import loading
from prelay_engine.blocks import BlockPool
from prelay_engine.config import EngineConfig
from prelay_engine.contiguous import ContiguousKv
from prelay_engine.kv import PagedKv
from prelay_engine.model import Model

#: Three query heads a key head: the group size whose remainders the attention kernel rounds differently.
TINY = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

MakeFolder = Callable[..., Path]
LoadModel = Callable[..., Model]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def tiny_network(kind: str, **changes: Any) -> Any:
    """A network with weights large enough that its layers matter and its logits differ."""
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(TINY | changes))).eval()
    with torch.no_grad():
        for weight in network.parameters():
            if weight.ndim > 1:
                weight.mul_(4)
            else:
                weight.add_(torch.randn_like(weight) * 0.1)
    return network


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> MakeFolder:
    """kind, changes to TINY → the folder of such a model."""

    @cache
    def make(kind: str, changes: tuple[tuple[str, Any], ...]) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        tiny_network(kind, **dict(changes)).save_pretrained(folder)
        return folder

    def of(kind: str = "llama", **changes: Any) -> Path:
        plain = {name: value for name, value in changes.items() if not isinstance(value, dict | list)}
        if plain == changes:
            return make(kind, tuple(sorted(changes.items())))
        folder = tmp_path_factory.mktemp(kind)
        tiny_network(kind, **changes).save_pretrained(folder)
        return folder

    return of


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: MakeFolder) -> LoadModel:
    """dtype, kernels → a loaded tiny Llama, one of each."""

    @cache
    def load(dtype: str = "float32", kernels: str = "native") -> Model:
        config = EngineConfig(model=tiny_folder("llama"), dtype=dtype, kernels=kernels)  # type: ignore[arg-type]
        return loading.load(config)

    return load


def contiguous(model: Model, blocks: int = 64, block_size: int = 16) -> ContiguousKv:
    return ContiguousKv(model.geometry, BlockPool(blocks), block_size)


def paged(model: Model, blocks: int = 64, block_size: int = 16) -> PagedKv:
    tensor = torch.zeros(blocks, *model.geometry.block_shape(block_size), dtype=model.geometry.dtype)
    return PagedKv(model.geometry, BlockPool(blocks), block_size, tensor)
