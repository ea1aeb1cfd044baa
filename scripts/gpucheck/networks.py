"""Random models: their shapes, a folder with one, and one made on the device without any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from prelay_engine import backend
from prelay_engine.config import EngineConfig, GpuConfig
from prelay_engine.gpu.layers import Linears, replace_layers
from prelay_engine.gpu.loading import load_on_gpu
from prelay_engine.gpu.model import GpuModel
from prelay_engine.linear import Kernel

from .rig import Rig

DEMO = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip
EIGHT_B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
_TINY = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 97, "tie_word_embeddings": True,
}  # fmt: skip
CONTEXT = 16384
_THETA = 100_000.0


def shape(rig: Rig, of: dict[str, Any]) -> LlamaConfig:
    values = rig.pick(of, _TINY)
    rope = {"rope_type": "default", "rope_theta": _THETA}
    return LlamaConfig(
        **values, max_position_embeddings=rig.pick(CONTEXT, 256), rope_parameters=rope, bos_token_id=1, eos_token_id=2
    )


def dtype(rig: Rig) -> torch.dtype:
    """Of models: in the interpreter float16 would be no type that loading knows."""
    return rig.pick(torch.bfloat16, torch.float32)


def saved(rig: Rig) -> Path:
    """A folder with a model of the demo model's shape."""

    def make() -> Path:
        folder = rig.folder / "model"
        torch.manual_seed(7)
        with rig.device:
            net = AutoModelForCausalLM.from_config(shape(rig, DEMO), dtype=dtype(rig))
        _spread(net)
        net.save_pretrained(folder)
        return folder

    found = rig.once("folder", make)
    rig.tidy()
    return found


def _spread(net: nn.Module) -> None:
    """Make layers matter: as they are initialised, they would add next to nothing to the embeddings."""
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, module.in_features**-0.5)


def config(rig: Rig, folder: Path, *, exact: bool, running: int = 32, chunk: int = 2048) -> EngineConfig:
    gpu = GpuConfig(device=str(rig.device), exact=exact)
    kind = rig.pick("bfloat16", "float32")
    return EngineConfig(folder, dtype=kind, max_running=running, prefill_chunk=chunk, gpu=gpu)  # type: ignore[arg-type]


def loaded(rig: Rig, *, exact: bool) -> GpuModel:
    """The saved model, loaded as a worker loads it."""
    return rig.once(f"model, exact={exact}", lambda: load_on_gpu(config(rig, saved(rig), exact=exact)))


class Switch(Linears):
    """Products of either kind over the same weights: `exact` is looked at in each step."""

    def made(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Kernel:
        weight = weight.detach().contiguous()
        usual, exact = (Linears(exact=each).made(weight, bias) for each in (False, True))
        return lambda x: (exact if self.exact else usual)(x)


@dataclass(slots=True)
class Made:
    """A network on the device, as two models that share its weights, and what it holds."""

    switch: Switch
    usual: GpuModel
    exact: GpuModel
    weights: int  # numbers of all products' weights, the last one's too
    shape: LlamaConfig

    def model(self, *, exact: bool) -> GpuModel:
        self.switch.exact = exact
        return self.exact if exact else self.usual


def made(rig: Rig, of: dict[str, Any]) -> Made:
    """Build it where it computes: loading by way of a disk would take minutes."""
    backend.register()
    configuration = shape(rig, of)
    torch.manual_seed(8)
    with rig.device:
        net = AutoModelForCausalLM.from_config(
            configuration, dtype=dtype(rig), attn_implementation=backend.PROBE
        ).eval()
    _spread(net)
    weights = sum(module.weight.numel() for module in net.modules() if isinstance(module, nn.Linear))
    probe = backend.run_probe(net)
    geometry = probe.geometry(configuration.num_hidden_layers, net.dtype)
    net.set_attn_implementation(backend.SERVE)
    switch = Switch(exact=False)
    with torch.no_grad():
        replace_layers(net, switch)
    rig.tidy()
    layers: Sequence[backend.Layer] = [probe.layers[index] for index in range(geometry.layers)]
    usual, exact = (
        GpuModel(net, geometry, layers, rig.pick(CONTEXT, 256), GpuConfig(device=str(rig.device), exact=exact))
        for exact in (False, True)
    )
    return Made(switch, usual, exact, weights, configuration)
