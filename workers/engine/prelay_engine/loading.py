"""From a folder or a .gguf file to a Model that is checked, speeded up and self-tested."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from . import backend, numerics
from .config import EngineConfig
from .demo import default_cache
from .errors import ConfigError, ModelError
from .experts import replace_experts
from .fused import Fused, fusible
from .gemma import mend_scale
from .geometry import Geometry
from .linear import replace_linears
from .memory import Thrift, keep_what_is_freed
from .model import Model, is_gguf, rope_types
from .native.build import NoKernels, library
from .native.lib import Kernels
from .rowwise import replace_rowwise
from .selftest import agrees, run_selftest

_OWN_ATTENTION = "attention of its own that cannot be replaced"
#: Modules with a state, by the names they have in transformers.
_STATEFUL = re.compile(r"Mamba|SSM|Rwkv|Recurrent|RgLru|DeltaNet|LinearAttention|ShortConv|LightningAttention")
_TOWERS = {"vision": "a vision tower", "audio": "an audio tower"}


log = logging.getLogger("prelay.engine")


def load(config: EngineConfig) -> Model:
    """Load, check, speed up and self-test the model of `config`. Raise ModelError, or ConfigError, with one line.

    1. Read the configuration and refuse what is known not to work. 2. Load the weights, all of them.
    3. Pin RoPE. 4. Run a probe and refuse what its layers ask for beyond our attention.
    5. Replace norms and activations, then all layers by fused ones or linears and experts by packed ones. 6. Self-test.
    """
    path = config.model.expanduser()
    check_files(path)
    kernels = _kernels(config)
    model = _load(config, path, kernels, fuse=kernels is not None)
    return model if model is not None else cast(Model, _load(config, path, kernels, fuse=False))


def _kernels(config: EngineConfig) -> Kernels | None:
    """The native kernels, None where torch is asked for or nothing can be compiled and it need not be."""
    if config.kernels == "torch":
        return None
    eight = config.quantization == "w8a8"
    try:
        return Kernels(library(default_cache(), log.info), config.threads, eight)
    except (NoKernels, OSError) as error:
        asked = "kernels=native" if config.kernels == "native" else "quantization=w8a8" if eight else ""
        if asked:
            raise ModelError(f"{asked}: {error}") from None
        log.warning("no native kernels, so torch computes, which is slower: %s", error)
        return None


def _load(config: EngineConfig, path: Path, kernels: Kernels | None, fuse: bool) -> Model | None:
    """None: the layers were fused, and what they compute is not what transformers' own do."""
    # What the kernels leave to torch is too small to share, and threads of torch that wait take cores from ours.
    torch.set_num_threads(config.threads if kernels is None else 1)
    thrift, fused = Thrift(), None
    with told(path):
        raw = prepare(config, path, _dtype(config), thrift)  # 1 to 4
        net, layers = raw.net, raw.layers
        with torch.inference_mode(mode=False), torch.no_grad():  # 5
            replace_rowwise(net)
            if kernels is not None and fuse and fusible(net, layers):
                fused = Fused(net, layers, kernels, thrift.let_go)
            else:
                replace_linears(net, thrift.let_go, kernels)
                replace_experts(net, thrift.let_go, kernels)
    thrift.give_back()
    model = Model(net, raw.geometry, layers, raw.context_len, config.threads, kernels, fused)
    if fused is not None and not agrees(model, raw.logits):
        log.warning("%s is not what its layers look like: they are not fused", type(net).__name__)
        return None
    result = run_selftest(model)  # 6
    if result.wrong:
        raise ModelError(result.text)
    model.exact, model.exactness = result.exact, result.text
    keep_what_is_freed()
    return model


@dataclass(frozen=True, slots=True)
class Prepared:
    """A network with its weights, checked: it reaches our attention, and its layers are of kinds that we compute."""

    net: Any
    geometry: Geometry
    layers: list[backend.Layer]
    context_len: int
    logits: torch.Tensor  # of the probe, [rows, vocabulary] on the CPU


def prepare(
    config: EngineConfig, path: Path, dtype: torch.dtype, thrift: Thrift, device: torch.device | None = None
) -> Prepared:
    """Steps 1 to 4 of `load`, from the third on on `device`. To be called within `told`."""
    net = _load_net(path, dtype)  # 1, 2
    thrift.give_back()
    if device is not None:
        net.to(device)
        thrift.give_back()
    context_len = _context_len(net, config)
    _pin_rope(net, context_len)  # 3
    probe = _probe(net)  # 4
    thrift.give_back()
    probe.check_masks(context_len)
    geometry = probe.geometry(_text_config(net).num_hidden_layers, net.dtype)
    net.set_attn_implementation(backend.SERVE)
    return Prepared(net, geometry, [probe.layers[index] for index in range(geometry.layers)], context_len, probe.logits)


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Whatever goes wrong within becomes one line about the model at `path`: ModelError, or ConfigError as it is."""
    try:
        yield
    except (ModelError, ConfigError):
        raise
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (backend.PROBE,):  # a class chosen by the name of an attention
            raise ModelError(f"the model of {path} has {_OWN_ATTENTION}") from None
        raise ModelError(f"cannot load {path}: {_first_line(error)}") from error


def check_files(path: Path) -> None:
    """Raise ModelError where there is no model, in one line."""
    if not path.exists():
        raise ModelError(f"there is no model at {path}")
    if path.is_file() and not is_gguf(path):
        raise ModelError(f"{path} is neither a model folder nor a .gguf file")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(f"{path} holds no config.json, so it is not a model folder")


def _dtype(config: EngineConfig) -> torch.dtype:
    if config.dtype == "auto":
        return torch.bfloat16 if numerics.native_bfloat16_matmul() else torch.float32
    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


def _load_net(path: Path, dtype: torch.dtype) -> Any:
    backend.register()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # what is wrong with a checkpoint we say ourselves
    where: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    folder = path
    if is_gguf(path):
        folder = path.parent
        where |= {"gguf_file": path.name} | _dequantise()
    else:
        _refuse_by_config(AutoConfig.from_pretrained(folder, **where))
    where |= {"dtype": dtype, "attn_implementation": backend.PROBE, "output_loading_info": True}
    where |= {"experts_implementation": "eager"}  # the faster ones refuse some sizes, and ours replace them anyway
    net, info = cast(Any, AutoModelForCausalLM.from_pretrained)(folder, **where)
    _refuse_by_config(net.config, converted=is_gguf(path))
    _check_weights(net, info)
    if is_gguf(path):
        mend_scale(net)
    return net.eval()


def _dequantise() -> dict[str, Any]:
    """Ask for plain weights where this version of transformers could also keep them packed."""
    packed = getattr(transformers, "GgufConfig", None)
    return {} if packed is None else {"quantization_config": packed(dequantize=True)}


def _refuse_by_config(config: Any, converted: bool = False) -> None:
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise ModelError(f"{config.model_type} is an encoder-decoder model; only decoder-only models are served")
    for kind in ("vision", "audio"):
        if getattr(config, f"{kind}_config", None) is not None:
            raise ModelError(f"{config.model_type} has {_TOWERS[kind]}; only models of text alone are served")
    if getattr(config, "quantization_config", None) is not None and not converted:
        raise ModelError("quantised checkpoints are not supported; use an unquantised one or a .gguf file")
    if getattr(text, "num_kv_shared_layers", 0):
        raise ModelError(f"{config.model_type} shares keys between layers, which is not supported")


def _probe(net: Any) -> backend.Probe:
    _refuse_by_modules(net)
    try:
        return backend.run_probe(net)
    except ModelError:
        raise
    except Exception:
        if getattr(net, "_supports_attention_backend", False):
            raise
        raise ModelError(f"{type(net).__name__} has {_OWN_ATTENTION}") from None


def _refuse_by_modules(net: Any) -> None:
    """Refuse what carries more from token to token than keys and values, also where it stands beside attention."""
    for module in net.modules():
        if isinstance(module, torch.nn.Conv1d) or _STATEFUL.search(type(module).__name__):
            name = type(module).__name__
            raise ModelError(f"{type(net).__name__} is a hybrid or recurrent model ({name}), which is not supported")


def _check_weights(net: Any, info: dict[str, Any]) -> None:
    """transformers fills what a checkpoint lacks with random numbers and only warns."""
    missing = sorted(set(info["missing_keys"]) - set(getattr(net, "all_tied_weights_keys", ())))
    wrong = [str(key[0] if isinstance(key, tuple) else key) for key in info["mismatched_keys"]]
    if missing or wrong:
        names = [*missing, *wrong]
        raise ModelError(f"the checkpoint lacks {len(names)} weights, first {names[0]}")


def _text_config(net: Any) -> Any:
    return net.config.get_text_config(decoder=True)


def _context_len(net: Any, config: EngineConfig) -> int:
    own = getattr(_text_config(net), "max_position_embeddings", None)
    if own is None:
        if config.max_model_len is None:
            raise ModelError("the model names no context length; set max_model_len")
        return config.max_model_len
    limit = int(own * _stretch(net))
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError("max_model_len", f"at most the model's {limit}", config.max_model_len)
    return int(config.max_model_len or own)


def _stretch(net: Any) -> float:
    """How much further than its own context a model reaches whose RoPE follows the length, if it is asked to."""
    rope = _text_config(net).to_dict().get("rope_parameters") or {}
    return float(rope.get("factor", 1.0)) if rope.get("rope_type") == "dynamic" else 1.0


def _pin_rope(net: Any, context_len: int) -> None:
    """Fix RoPE variants that follow the longest position of a batch at what they are for `context_len`.

    Left alone they would make a row depend on its neighbours, and prefill and decode disagree.
    """
    config = _text_config(net).to_dict()
    following = {name for name in rope_types(config) if "dynamic" in name or name == "longrope"}
    if not following:
        return
    ropes = [module for module in net.modules() if hasattr(module, "rope_type") and hasattr(module, "forward")]
    if not ropes:
        raise ModelError(f"RoPE of type {', '.join(sorted(following))} cannot be pinned in this model")
    x, last = (torch.tensor(what, device=net.device) for what in ([0.0], [[context_len - 1]]))
    x = x.to(net.dtype)
    for rope in ropes:
        if isinstance(rope.rope_type, dict):  # one for each type of layer
            for kind in rope.rope_type:
                rope(x, position_ids=last, layer_type=kind)
            rope.rope_type = dict.fromkeys(rope.rope_type, "default")
        else:
            rope(x, position_ids=last)
            rope.rope_type = "default"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
