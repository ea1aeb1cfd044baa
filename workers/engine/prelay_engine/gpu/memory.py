"""How much of a card's memory a worker takes, and how many KV blocks that leaves. Pure, but for `CardMemory`.

Several workers may share a card, and may start at the same moment. So what one takes follows from its own share of the
card, and from nothing that changes meanwhile; what is free can only make it less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ..errors import ModelError, OutOfMemory

#: What a process takes beside torch's allocator, bytes: CUDA's context, the code of kernels, fragments of allocations.
#: An estimate, on the safe side.
OVERHEAD_NBYTES = 768 << 20
#: What one captured graph takes, bytes, beside memory for its results, which all of them share. An estimate, too.
GRAPH_NBYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Demand:
    """What a worker found before it takes its KV blocks. All but the first are bytes, or numbers of blocks."""

    fraction: float  # of the card: this worker's own share
    total: int  # of the card
    free: int  # on the card now; what others use, and what this process holds, is not
    held: int  # by this process's tensors: weights and buffers
    peak: int  # the most its tensors took in its largest step, `held` included
    graphs: int  # what captured graphs are going to take
    block_nbytes: int
    context_blocks: int  # of the longest sequence


def blocks_for(demand: Demand) -> int:
    """How many KV blocks the worker takes: its own share's worth, or what is free where that is less.

    Raises ModelError when one sequence of full length would not fit.
    """
    own = int(demand.total * demand.fraction) - demand.peak - demand.graphs - OVERHEAD_NBYTES
    there = demand.free - (demand.peak - demand.held) - demand.graphs
    blocks = max(0, min(own, there)) // demand.block_nbytes
    if blocks < demand.context_blocks:
        raise ModelError(_too_small(demand, own, there))
    return blocks


def _too_small(demand: Demand, own: int, there: int) -> str:
    context = demand.context_blocks * demand.block_nbytes
    apart = demand.peak + demand.graphs + OVERHEAD_NBYTES
    share = f"--gpu-memory-utilization gives this worker {_gib(int(demand.total * demand.fraction))}"
    takes = f"one sequence of full length takes {_gib(context)} of KV blocks"
    if there < min(own, context):
        return (
            f"{takes}; {share} of the card's {_gib(demand.total)}, but others have taken so much that only "
            f"{_gib(max(0, there))} are left for it: stop them, or shorten --max-model-len"
        )
    return (
        f"{takes}, and weights, the largest step and CUDA graphs {_gib(apart)}: {_gib(context + apart)} are needed, "
        f"but {share} of the card's {_gib(demand.total)}: raise it, shorten --max-model-len, or lower --prefill-chunk"
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


class LargestStep(Protocol):
    """Runs a step on nothing of value, and waits for it."""

    def __call__(self, prompt_tokens: int, rows: int, /) -> None:
        """One prompt chunk of `prompt_tokens`, and beside it `rows` single rows, logits and sampling included."""


class Profile(Protocol):
    """What `CardMemory` measures. All in bytes."""

    def start(self) -> int:
        """From now on a new peak is kept; what tensors hold now."""

    def peak(self) -> int:
        """The most that tensors held at once since then."""

    def free_total(self) -> tuple[int, int]:
        """What is free on the card now, and all of it. What this process only keeps for later is free."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes, as in `Demand`."""

    held: int
    peak: int
    free: int
    total: int


def measure(memory: Profile, step: LargestStep, prompt_tokens: int, rows: int) -> Measured:
    """Run the largest step that may come, with `rows` sequences running. Raises ModelError if it does not fit."""
    held = memory.start()
    failure = None
    try:
        step(prompt_tokens, rows)
    except (RuntimeError, OutOfMemory) as error:
        if not is_out_of_memory(error):
            raise
        failure = ModelError(
            f"a step of {prompt_tokens} prompt tokens and {rows} rows finds no memory on the card beside the model: "
            "lower --prefill-chunk or --max-running, or use a smaller model"
        )
    if failure is not None:
        raise failure
    peak = memory.peak()
    free, total = memory.free_total()
    return Measured(held, peak, free, total)


class CardMemory:
    """What torch and the driver say of one device's memory. Bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)

    def free_total(self) -> tuple[int, int]:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)


def graphs_nbytes(buckets: int, largest: int) -> int:
    """What so many graphs take: that of the largest step among them, `largest` bytes, is shared by all."""
    return largest + buckets * GRAPH_NBYTES


#: What errors say, of several kinds and without a type of their own, when the device has no memory left.
_SAID = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "cudaErrorMemoryAllocation")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch, CUDA, cuBLAS or Triton raised it because the device has no memory left."""
    kinds = (torch.OutOfMemoryError, OutOfMemory)
    return isinstance(error, kinds) or (isinstance(error, RuntimeError) and any(said in str(error) for said in _SAID))
