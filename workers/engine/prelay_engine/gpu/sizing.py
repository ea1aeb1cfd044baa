"""How many KV blocks a model leaves room for on its card: asked by running the largest step that may come."""

from __future__ import annotations

from prelay_queue.job import Sampling

from ..attention import Span
from ..config import EngineConfig
from ..sampler import Draw
from .buckets import Buckets
from .memory import CardMemory, Demand, blocks_for, graphs_nbytes, measure
from .model import GpuModel

#: Settings that take the most work to draw with.
_SAMPLING = Sampling(max_tokens=1, temperature=1.0, top_p=0.9, top_k=50, min_p=0.01)


def kv_blocks(model: GpuModel, config: EngineConfig, *, decodes: bool) -> int:
    """KV blocks that fit beside weights, steps and graphs. Raise ModelError when not even one full context does."""
    assert config.gpu is not None
    step = LargestStep(model, config.block_size)
    found = measure(CardMemory(model.device), step, config.prefill_chunk, config.max_running)
    peak = found.peak - step.nbytes
    buckets = len(Buckets(config.max_running).sizes) if decodes and config.gpu.graphs else 0
    return blocks_for(
        Demand(
            fraction=config.gpu.memory_utilization,
            total=found.total,
            free=found.free,
            held=found.held,
            peak=peak,
            graphs=_buffers(model, config) + graphs_nbytes(buckets, peak - found.held) if decodes else 0,
            block_nbytes=model.geometry.block_bytes(config.block_size),
            context_blocks=-(-model.context_len // config.block_size),
        )
    )


def _buffers(model: GpuModel, config: EngineConfig) -> int:
    """Bytes of a decoder's static buffers: logits, room to sample in, block tables twice."""
    blocks = -(-model.context_len // config.block_size)
    return config.max_running * (2 * 4 * model.vocab_size + 2 * 4 * blocks)


class LargestStep:
    """Runs a step on a pool of its own, of `nbytes` bytes.

    More prompt tokens than a context holds are several prompts.
    """

    def __init__(self, model: GpuModel, block_size: int) -> None:
        self._model, self._size = model, block_size
        self.nbytes = 0

    def __call__(self, prompt_tokens: int, rows: int) -> None:
        size, most = self._size, self._model.context_len - 1
        lengths = [min(most, prompt_tokens - done) for done in range(0, prompt_tokens, most)]
        blocks = rows + sum(-(-length // size) for length in lengths)
        self.nbytes = blocks * self._model.geometry.block_bytes(size)
        store = self._model.store(blocks, size)
        spans = [Span(str(row), 0, 1) for row in range(rows)]
        spans += [Span(f"prompt {number}", 0, length) for number, length in enumerate(lengths)]
        spans.sort(key=lambda span: span.length > 1)
        for span in spans:
            store.open(span.key, span.length, span.length)
        ids = [row % self._model.vocab_size for row in range(rows + prompt_tokens)]
        draws = [(row, Draw(_SAMPLING, 0)) for row in (*range(rows), rows + prompt_tokens - 1)]
        self._model.step(store, spans, ids, draws, ())
