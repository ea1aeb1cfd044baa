"""Steps of single rows only: computed in buffers that stay where they are, and replayed as CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..attention import Span
from ..backend import serving
from ..kv import KvStore, PagedKv
from ..sampler import Draw
from .batch import GpuBatch
from .buckets import Buckets
from .buffers import DecodeBatch, DecodeBuffers, DecodeRows
from .draws import Params
from .graphs import Capture, GraphRunner
from .inputs import Inputs
from .kernels import sample as sampling
from .kernels.tiles import Tiles

if TYPE_CHECKING:
    from .model import GpuModel


class Decoder:
    """Decodes up to `max_rows` sequences of one store. For the thread that steps.

    What a graph holds is addresses: of the store's pool, of the weights, and of buffers that belong to this.
    """

    def __init__(self, model: GpuModel, store: PagedKv, max_rows: int, capture: Capture | None) -> None:
        """Without `capture` nothing is captured: the same steps run kernel by kernel. May raise OutOfMemory."""
        self._model, self._store = model, store
        vocab, device = model.vocab_size, model.device
        blocks = store.blocks_for(model.context_len)
        self._buffers = DecodeBuffers(max_rows, blocks, vocab, device, logits=True)
        self._sorted = torch.empty(max_rows, vocab, dtype=torch.float32, device=device)
        self._numbers = torch.arange(max_rows, dtype=torch.int32, device=device)
        self._scratch = model.room(max_rows)
        self._runner = None if capture is None else GraphRunner(Buckets(max_rows), capture)
        if self._runner is not None:
            self._buffers.clear()
            self._runner.capture_all(self._run)

    @property
    def graphs(self) -> str:
        """Which steps are replayed, in words; '' where none is."""
        return "" if self._runner is None else f"CUDA graphs: {self._runner.state}"

    def takes(self, store: KvStore, spans: Sequence[Span], draws: Sequence[tuple[int, Draw]]) -> bool:
        """Whether a step is of this kind: single rows of this store, a token from each, and no more than fit."""
        rows = len(spans)
        single = store is self._store and all(span.length == 1 for span in spans)
        return single and rows <= self._buffers.max_rows and [row for row, _ in draws] == list(range(rows))

    def compute(
        self, spans: Sequence[Span], ids: Sequence[int], draws: Sequence[Draw]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Enqueue it: logits float32 [row, vocabulary] and tokens int64 [row], good until the next step."""
        rows, size = len(spans), self._store.block_size
        positions = np.array([span.start for span in spans], dtype=np.int64)
        tables = [self._store.pool.blocks(span.key) for span in spans]
        last = np.array([own[at] for own, at in zip(tables, positions // size, strict=True)], dtype=np.int64)
        self._buffers.fill(DecodeBatch(ids, positions, last * size + positions % size, tables, *Params.of(draws)))
        if self._runner is None:
            self._run(rows)
        else:
            self._runner.compute(rows, self._run)
        found = self._buffers.first(rows)
        assert found.logits is not None
        return found.logits, found.tokens

    def _run(self, rows: int) -> None:
        """The first `rows` rows of the buffers, with nothing read on the host: this is what is captured."""
        view, model = self._buffers.first(rows), self._model
        batch = GpuBatch(self._store.tensor, self._inputs(view), self._scratch, model.sinks, exact=model.config.exact)
        with serving(batch):
            found = model.net(input_ids=view.ids[None], position_ids=view.positions[None], use_cache=False)
        assert view.logits is not None
        view.logits.copy_(found.logits[0])
        sampling.sample(
            view.logits, view.temperature, view.top_k, view.top_p, view.min_p, view.point, view.tokens, self._sorted
        )

    def _inputs(self, view: DecodeRows) -> Inputs:
        if not self._model.config.exact:
            return Inputs(view.ids, view.positions, view.slots, view.tables, view.lengths, {})
        number = self._numbers[: len(view.ids)]
        owner = torch.where(view.lengths > 0, number, -1)
        table = torch.stack((owner, number, torch.ones_like(number), view.positions.to(torch.int32)), dim=1)
        tiles = {rows: Tiles(table, rows) for rows in self._model.tile_rows}
        return Inputs(view.ids, view.positions, view.slots, view.tables, view.lengths[:0], tiles)

    def __repr__(self) -> str:
        return f"<Decoder {self._buffers!r}, {self._runner!r}>"
