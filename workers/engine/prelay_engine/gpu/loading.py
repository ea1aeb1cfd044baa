"""From a folder or a .gguf file to a model on a GPU, checked and self-tested."""

from __future__ import annotations

import logging

import torch

from ..config import EngineConfig
from ..errors import ModelError
from ..loading import check_files, prepare, told
from ..memory import Thrift
from ..selftest import agrees
from .layers import Linears, replace_layers
from .model import GpuModel
from .selftest import run_selftest

log = logging.getLogger("prelay.engine")

_DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def load_on_gpu(config: EngineConfig) -> GpuModel:
    """Load, check and self-test the model of `config` on its GPU. Raise ModelError, or ConfigError, with one line.

    1. Load and check as for the CPU (`loading.prepare`), on the device. 2. Replace norms, MLPs and linears. 3. Compare
    with what transformers' own layers gave. 4. Self-test.
    """
    assert config.gpu is not None
    path = config.model.expanduser()
    check_files(path)
    device = _device(config.gpu.device)
    with told(path), torch.no_grad():
        raw = prepare(config, path, _DTYPES[config.dtype], Thrift(), device)  # 1
        replace_layers(raw.net, Linears(exact=config.gpu.exact))  # 2
        give_back(device)
        model = GpuModel(raw.net, raw.geometry, raw.layers, raw.context_len, config.gpu)
        if not agrees(model, raw.logits):  # 3
            raise ModelError(f"the kernels for GPUs do not compute what {type(raw.net).__name__} does: not served")
        result = run_selftest(model)  # 4
    if result.wrong:
        raise ModelError(result.text)
    model.exact, model.exactness = result.exact, result.text
    give_back(device)
    return model


def _device(name: str) -> torch.device:
    """The device, made the current one of this thread. Raise ModelError where it is not there."""
    device = torch.device(name)
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.index is None or device.index >= count:
        build = "" if torch.version.cuda else "; this torch was built without CUDA"
        raise ModelError(f"there is no GPU {device.index}: torch sees {count}{build} (prelay doctor says more)")
    torch.cuda.set_device(device)
    return device


def give_back(device: torch.device) -> None:
    """Give memory of the device that torch keeps for later back to the driver."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
