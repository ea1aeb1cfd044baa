"""What a worker process is told at its start."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from prelay_engine.config import GpuConfig
from prelay_queue.settings import QueueSettings


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    UNIFIED = "unified"


@dataclass(frozen=True, slots=True)
class NullModel:
    """A fake model for tests and for measuring the pipeline: tokens are hashes of what came before.

    In `divergent` mode the epoch goes into the hash, so that a resume that keeps the wrong tokens cannot hide
    behind an identical regeneration.
    """

    vocab_size: int = 1000
    divergent: bool = False
    step_ms: float = 1.0
    prefill_ms_per_token: float = 0.0
    eos_ids: tuple[int, ...] = ()
    #: A prompt with this token kills the worker that computes on it, as a bug in a kernel would.
    poison_token: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker process. `model` is a local folder; with `null` set it only serves the tokenizer (stop strings)."""

    role: Role
    queue: QueueSettings
    model: Path | None
    kv_blocks: int
    block_size: int = 16
    dtype: str = "auto"
    kernels: str = "auto"
    quantization: str = "none"
    max_running: int = 32
    prefill_chunk: int = 256
    #: What a step should take that has prompts of class batch only, milliseconds.
    batch_step_ms: float = 400.0
    max_model_len: int | None = None
    threads: int = 1
    max_preemptions: int = 3
    prefix_cache: bool = True
    #: A decode worker takes prefills of up to so many tokens itself, which no prefill worker has taken; 0: none.
    local_prefill_tokens: int = 0
    #: A job that waits for room counts one class higher each time after so long, seconds.
    patience_s: float = 30.0
    #: Metrics are shown on this port; 0: nowhere.
    metrics_port: int = 0
    metrics_host: str = "127.0.0.1"
    null: NullModel | None = None
    #: None: it computes on the CPU. On a GPU `kv_blocks` 0 is as many as fit.
    gpu: GpuConfig | None = None
    #: How blocks leave a GPU: auto, cuda_ipc or pinned.
    kv_transport: str = "auto"

    @property
    def keeps_prefixes(self) -> bool:
        """Whether its pool has a prefix cache: only where prompts are computed here.

        What was prefilled elsewhere is copied whole: from a cache of our own it would come no faster (docs/design.md,
        section 11).
        """
        return self.prefix_cache and (self.role is not Role.DECODE or self.local_prefill_tokens > 0)
