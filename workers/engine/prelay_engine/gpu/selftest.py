"""Does a row's result depend on its neighbours on this card? Asked at load, of the whole model."""

from __future__ import annotations

import torch

from ..attention import Span
from ..config import POSITION_BLOCK
from ..selftest import WRONG, SelfTest, model_difference
from .model import GpuModel

#: Sequences beside the one that is looked at, and their length: more rows than a tile has, and than cuBLAS cuts alike.
_OTHERS, _LENGTH = 3, 24
#: Positions at its end that are computed as single rows.
_SINGLE = 3


@torch.inference_mode()
def run_selftest(model: GpuModel) -> SelfTest:
    difference = max(model_difference(model), _among_others(model))
    if difference > WRONG[model.geometry.dtype]:
        return SelfTest(False, "rows depend on their neighbours altogether", wrong=True)
    if not model.config.exact:
        return SelfTest(False, "rows may depend on their neighbours in the last bits (--exact: they do not, at a cost)")
    if model.experts:
        return SelfTest(False, "rows may depend on their neighbours: experts are computed by torch")
    if difference:
        return SelfTest(False, "rows depend on their neighbours here, though all kernels are exact ones")
    return SelfTest(True, "exact: rows do not depend on their neighbours (the whole model tried)")


def _among_others(model: GpuModel) -> float:
    """How far the logits of one text differ, computed in a chunk of its own and then row by row beside others."""
    ids = [[(7 * i + 3 + 11 * text) % model.vocab_size for i in range(_LENGTH)] for text in range(_OTHERS + 1)]
    blocks = -(-_LENGTH // POSITION_BLOCK) * (_OTHERS + 1)
    rows = list(range(_LENGTH))
    alone = model.store(blocks, POSITION_BLOCK)
    alone.open("0", _LENGTH, _LENGTH)
    whole = model.forward(alone, [Span("0", 0, _LENGTH)], ids[0], rows)
    store = model.store(blocks, POSITION_BLOCK)
    for text in range(_OTHERS + 1):
        store.open(str(text), _LENGTH, _LENGTH)
    first = _LENGTH - _SINGLE
    spans = [Span(str(text), 0, first) for text in range(_OTHERS + 1)]
    parts = [model.forward(store, spans, [i for each in ids for i in each[:first]], list(range(first)))]
    for position in range(first, _LENGTH):
        spans = [Span(str(text), position, 1) for text in range(_OTHERS + 1)]
        parts.append(model.forward(store, spans, [each[position] for each in ids], [0]))
    found = torch.cat(parts)
    if torch.equal(found, whole):
        return 0.0
    return max(float(((found - whole).abs().amax(-1) / whole.std()).median()), 1e-30)
