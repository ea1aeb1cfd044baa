"""The engine's settings, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from .errors import ConfigError

DType = Literal["auto", "float32", "bfloat16"]
#: What computes: C++ compiled for this CPU at the first start, or torch. auto: C++ where there is a compiler.
KernelsChoice = Literal["auto", "native", "torch"]
#: How weights are kept. w8a8: they, and the rows that they multiply, in eight bits (native kernels only).
Quantization = Literal["none", "w8a8"]

#: Positions. A row's keys are padded to the end of its own block of this many positions, so that the
#: padding never depends on neighbours or chunks (see `attention.py`). Fixed: it is part of the numerics.
#: 64, 128 and 256 were equally exact and equally fast in prefill; 64 wastes least in decode.
POSITION_BLOCK = 64


@dataclass(frozen=True, slots=True)
class GpuConfig:
    """How an engine uses a GPU. Raises ConfigError for a value out of range."""

    device: str = "cuda:0"  # as torch names it
    memory_utilization: float = 0.9  # of the whole card's memory: what this process may take, all in all
    exact: bool = False  # rows whose bits depend on nothing else, at a cost
    graphs: bool = True  # decode steps are captured once, and replayed

    def __post_init__(self) -> None:
        if not 0 < self.memory_utilization <= 1:
            raise ConfigError("memory_utilization", "above 0 and at most 1", self.memory_utilization)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What one engine runs and how much it may hold. Raises ConfigError for a value out of range."""

    model: Path  # a Hugging Face folder, or a .gguf file
    dtype: DType = "auto"  # bfloat16 where the CPU multiplies it natively, else float32
    block_size: int = 16  # positions a KV block
    num_blocks: int = 1024  # KV blocks of this engine's pool
    max_running: int = 32  # sequences that are prefilled, copied in or decoded at the same time
    prefill_chunk: int = 256  # prompt tokens a step, over all sequences
    batch_step_ms: float = 400.0  # what a step should take that has prompts of class batch only, milliseconds
    max_model_len: int | None = None  # positions a sequence; None is the model's own limit
    threads: int = 1  # that compute a step
    kernels: KernelsChoice = "auto"
    quantization: Quantization = "none"
    gpu: GpuConfig | None = None  # None: it computes on the CPU

    def __post_init__(self) -> None:
        for name, kind in (("dtype", DType), ("kernels", KernelsChoice), ("quantization", Quantization)):
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(name, f"one of {', '.join(get_args(kind))}", getattr(self, name))
        if self.quantization != "none" and self.kernels == "torch":
            raise ConfigError("quantization", "none with kernels=torch", self.quantization)
        if self.quantization != "none" and self.gpu is not None:
            raise ConfigError("quantization", "none on a GPU", self.quantization)
        if self.block_size < 1 or POSITION_BLOCK % self.block_size:
            raise ConfigError("block_size", f"a divisor of {POSITION_BLOCK}", self.block_size)
        for name in ("num_blocks", "max_running", "prefill_chunk", "threads"):
            value: int = getattr(self, name)
            if value < 1:
                raise ConfigError(name, "at least 1", value)
        if not self.batch_step_ms > 0:
            raise ConfigError("batch_step_ms", "above 0", self.batch_step_ms)
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError("max_model_len", "at least 2", self.max_model_len)
