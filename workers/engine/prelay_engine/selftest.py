"""Does a row's result depend on its neighbours here? Asked of every kind of kernel at load, in a fraction of a second.

Exactness is a property of an instruction set, a library version and a thread count, not of this code alone. Where
the test fails the engine still serves, and says that a restart may change a continuation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .attention import Span
from .backend import PROBE_IDS
from .blocks import BlockPool
from .config import POSITION_BLOCK
from .contiguous import ContiguousKv
from .experts import Mixture
from .linear import FusedPart, PackedLinear
from .rowwise import RMSNorm

if TYPE_CHECKING:
    from .backend import Layer
    from .model import Model

Kernel = Callable[[torch.Tensor], torch.Tensor]

#: Row counts at which kernels change their ways: one row (run as two), a remainder, more than a tile. Each
#: reads all weights once, so there are few.
_COUNTS = (1, 3, 17)
_ROWS = 33
#: No multiple of a vector's length, so that every row ends in a remainder.
_ODD_WIDTH = 1003
#: Standard deviations of the logits that no rounding explains, by dtype.
WRONG = {torch.float32: 1e-3, torch.bfloat16: 0.5}
#: … nor that of weights to eight bits.
_EIGHT = 0.5
#: Positions where attention is tried: within the first block, at an edge, past the kernel's split of 512 keys.
_STARTS = (3, POSITION_BLOCK - 1, 9 * POSITION_BLOCK + 5)


@dataclass(frozen=True, slots=True)
class SelfTest:
    """`text` is one line: what was tried and, if `exact` is false, what differed.

    `wrong`: not in the last bits, but altogether; such a model must not be served.
    """

    exact: bool
    text: str
    wrong: bool = False


@torch.inference_mode()
def run_selftest(model: Model) -> SelfTest:
    generator = torch.Generator().manual_seed(1)
    difference = model_difference(model)
    if difference > WRONG[model.geometry.dtype]:
        return SelfTest(False, "the model carries more from token to token than keys and values", wrong=True)
    if uncovered := _uncovered(model.net):
        return SelfTest(False, f"rows may depend on their neighbours: {', '.join(uncovered)} run kernels of their own")
    tried, differing = 0, []
    for name, differs in (*_checks(model, generator), ("the whole model", difference > 0)):
        tried += 1
        if differs:
            differing.append(name)
    if differing:
        return SelfTest(False, f"rows depend on their neighbours here: {', '.join(differing)}")
    return SelfTest(True, f"exact: rows do not depend on their neighbours ({tried} kernels tried)")


@torch.inference_mode()
def agrees(model: Model, expected: torch.Tensor) -> bool:
    """Whether the logits of PROBE_IDS are those [rows, vocabulary] that transformers' own layers gave."""
    store = model.store(1, POSITION_BLOCK)
    store.open("a", len(PROBE_IDS), len(PROBE_IDS))
    rows = list(range(len(PROBE_IDS)))
    found = model.forward(store, [Span("a", 0, len(PROBE_IDS))], PROBE_IDS, rows)
    eight = model.kernels is not None and model.kernels.eight
    return _distance(found, expected) <= (_EIGHT if eight else WRONG[model.geometry.dtype])


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The median over the rows of how far they differ, in standard deviations: a row may go through other experts."""
    return float(((a - b).abs().amax(-1) / b.std()).median())


def _uncovered(net: torch.nn.Module) -> list[str]:
    """Modules that multiply by weights in ways that we did not replace, such as experts of an unknown kind."""
    return sorted(
        {
            type(module).__name__
            for module in net.modules()
            if not isinstance(module, torch.nn.Embedding)
            and not _is_norm_of_heads(module)
            and any(parameter.squeeze().ndim > 1 for parameter in module.parameters(recurse=False))
        }
    )


def _is_norm_of_heads(module: torch.nn.Module) -> bool:
    """A norm with a weight for each head: it multiplies number by number."""
    weights = list(module.parameters(recurse=False))
    return type(module).__name__.endswith("Norm") and bool(weights) and all(weight.ndim == 2 for weight in weights)


def _checks(model: Model, generator: torch.Generator) -> Iterator[tuple[str, bool]]:
    dtype = model.geometry.dtype
    for name, (width, kernel) in _row_kernels(model.net).items():
        yield name, _rows_differ(kernel, torch.randn(1, _ROWS, width, generator=generator).to(dtype))
    for layer in dict.fromkeys(model.layers):
        for start in _STARTS:
            yield f"{_describe(layer)} at {start}", _attention_differs(model, layer, start, generator)


def _row_kernels(net: torch.nn.Module) -> dict[str, tuple[int, Kernel]]:
    """One kernel of each kind and size, by a name, with the width of its input."""
    kernels: dict[str, tuple[int, Kernel]] = {}
    for path, module in net.named_modules():
        if isinstance(module, PackedLinear):
            kernels[f"linear {module.in_features}→{module.out_features}"] = module.in_features, module
        elif isinstance(module, FusedPart):
            kernels[f"linear {module.in_features}→{module.group.width}"] = module.in_features, module.group.whole
        elif isinstance(module.forward, Mixture):
            kernels[f"mixture {type(module).__name__}"] = module.forward.width, module.forward.whole
        elif isinstance(module, RMSNorm):
            kernels[f"norm {module.width}"] = module.width, module
        elif isinstance(module, torch.nn.LayerNorm):
            kernels[f"norm {module.normalized_shape[-1]}"] = module.normalized_shape[-1], module
        elif _is_norm_of_heads(module):
            weight = next(module.parameters(recurse=False))
            kernels[f"norm {weight.shape[0]}×{weight.shape[1]}"] = weight.numel(), _flattened(module, weight.shape)
        elif "act" in path.rpartition(".")[2] and not any(True for _ in module.parameters()):
            kernels[f"activation {type(module).__name__}"] = _ODD_WIDTH, module
    return kernels


def _flattened(module: torch.nn.Module, shape: torch.Size) -> Kernel:
    def run(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = module(x.unflatten(-1, shape))
        return out.flatten(-2)

    return run


def _rows_differ(kernel: Kernel, x: torch.Tensor) -> bool:
    whole = kernel(x)
    for count in _COUNTS:
        start = _ROWS - count - 1
        if not torch.equal(kernel(x[:, start : start + count]), whole[:, start : start + count]):
            return True
    return False


def _describe(layer: Layer) -> str:
    form = layer.form
    parts = [
        f"window {form.window}" if form.window is not None else "",
        f"cap {form.softcap:g}" if form.softcap is not None else "",
        "sinks" if layer.sinks else "",
    ]
    kind = ", ".join(part for part in parts if part)
    return f"attention ({kind})" if kind else "attention"


def _attention_differs(model: Model, layer: Layer, start: int, generator: torch.Generator) -> bool:
    """Rows from `start` computed in one chunk, in two, and one by one beside another sequence."""
    geometry, count = model.geometry, 24
    shape = (1, layer.heads, start + count, geometry.head_dim)
    query = torch.randn(shape, generator=generator).to(geometry.dtype)
    keys, values = (
        torch.randn(1, geometry.kv_heads, *shape[2:], generator=generator).to(geometry.dtype) for _ in range(2)
    )
    sinks = torch.randn(layer.heads, generator=generator) if layer.sinks else None

    def run(*cuts: int) -> torch.Tensor:
        store = ContiguousKv(geometry, BlockPool(256), POSITION_BLOCK)
        store.open("a", start + count, start + count)
        store.open("b", 1, 1)
        outs, begin = [], 0
        for cut in (*cuts, start + count):
            spans = [Span("b", 0, 1), Span("a", begin, cut - begin)]
            rows = torch.cat((torch.zeros(1, dtype=torch.long), torch.arange(begin, cut)))
            batch = model.batch(store, spans)
            out = batch.attend(0, query[:, :, rows], keys[:, :, rows], values[:, :, rows], layer.form, sinks)
            outs.append(out[:, 1:])
            begin = cut
        return torch.cat(outs, dim=1)

    whole = run(start)
    parts = run(start, start + 9)
    single = run(*range(start, start + count))
    return not (torch.equal(whole, parts) and torch.equal(whole[:, start:], single[:, start:]))


def model_difference(model: Model) -> float:
    """How far the logits of a short text differ, computed in one chunk, and in a single row, three and the rest.

    0 if no bit does; else the median over the rows, in standard deviations: a row may go through other experts.
    """
    ids = [(7 * i + 3) % model.vocab_size for i in range(13)]

    def run(*cuts: int) -> torch.Tensor:
        store = model.store(1, POSITION_BLOCK)
        store.open("a", len(ids), len(ids))
        begin, logits = 0, []
        for cut in (*cuts, len(ids)):
            rows = list(range(cut - begin))
            logits.append(model.forward(store, [Span("a", begin, cut - begin)], ids[begin:cut], rows))
            begin = cut
        return torch.cat(logits)

    whole, parts = run(), run(1, 4)
    if torch.equal(whole, parts):
        return 0.0
    return max(_distance(parts, whole), 1e-30)
