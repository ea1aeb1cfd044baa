"""How transformers' model classes reach our attention.

Two implementations are registered. PROBE runs once at load, with plain attention: it sees what every layer asks for and
refuses what `attend` would not honour. SERVE is the one that works on the KV store; it has no mask
function, so the classes build no masks. Which batch (or probe) a forward is for is kept beside the call, not in its
arguments: many classes do not hand those through to their attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from .attention import Form
from .errors import Abandoned, ModelError
from .flag import Flag
from .geometry import Geometry

PROBE = "prelay_probe"
SERVE = "prelay"

#: What the probe computes: tokens that every vocabulary has, some of them twice.
PROBE_IDS = (0, 1, 2, 3, 4, 2, 1, 3, 4, 0, 1)

#: Keyword arguments of attention functions that change the result and that we do not honour.
_REFUSED = {
    "position_bias": "an attention bias",
    "head_mask": "a head mask",
}


class Attends(Protocol):
    """One step's rows, and where their keys and values are."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        form: Form,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the new keys and values and attend: query [1, head, rows, dim] → [1, rows, head, dim]."""


_BATCH: ContextVar[tuple[Attends, Flag | None]] = ContextVar("prelay_batch")
_PROBE: ContextVar[Probe] = ContextVar("prelay_probe")


@contextmanager
def serving(batch: Attends, abandon: Flag | None = None) -> Iterator[None]:
    """Attention of the forwards within, in this thread, works on `batch`, until `abandon` is set."""
    token = _BATCH.set((batch, abandon))
    try:
        yield
    finally:
        _BATCH.reset(token)


@dataclass(frozen=True, slots=True)
class Layer:
    """What one attention layer asked for."""

    heads: int
    kv_heads: int
    head_dim: int
    form: Form
    sinks: bool


@dataclass(slots=True)
class Probe:
    """What the layers and the mask functions of one forward asked for."""

    layers: dict[int, Layer] = field(default_factory=dict)
    masks: list[Callable[..., Any]] = field(default_factory=list)
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # of PROBE_IDS, [rows, vocabulary]

    def geometry(self, layers: int, dtype: torch.dtype) -> Geometry:
        """The KV geometry, if all `layers` came by and agree; else ModelError."""
        missing = layers - len(self.layers)
        if missing or set(self.layers) != set(range(layers)):
            raise ModelError(
                f"{missing} of {layers} layers do not use attention that can be paged (hybrid and recurrent "
                "models, latent attention, and layers that share another's keys are not supported)"
            )
        shapes = {(layer.kv_heads, layer.head_dim) for layer in self.layers.values()}
        if len(shapes) > 1:
            raise ModelError(f"layers with different key shapes are not supported: {sorted(shapes)}")
        (kv_heads, head_dim), *_ = shapes
        return Geometry(layers, kv_heads, head_dim, dtype)

    def check_masks(self, context_len: int) -> None:
        """Refuse masks other than causal ones, with or without one of the layers' sliding windows.

        A mask in which a row does not even see itself is for a kind of layer that the model has none of.
        """
        windows = {layer.form.window for layer in self.layers.values()} | {None}  # asked for, if not by any layer
        for mask in self.masks:
            itself = _sees(mask, 3, torch.tensor([3]))
            if itself is not None and not itself.any():
                continue
            if not any(_is_window(mask, window, context_len) for window in windows):
                raise ModelError("the model masks attention in a way that is neither causal nor a sliding window")


def _is_window(mask: Callable[..., Any], window: int | None, context_len: int) -> bool:
    keys = torch.arange(context_len)
    for position in {context_len - 1, context_len // 2 + 1, context_len // 3}:
        oldest = 0 if window is None else position - window + 1
        seen = _sees(mask, position, keys)
        if seen is None or not torch.equal(seen, (keys <= position) & (keys >= oldest)):
            return False
    return True


def _sees(mask: Callable[..., Any], position: int, keys: torch.Tensor) -> torch.Tensor | None:
    """Which of `keys` the row at `position` attends to; None if the mask depends on more than positions."""
    zero = torch.tensor(0)
    try:
        seen: torch.Tensor = mask(zero, zero, torch.tensor(position), keys)
        return seen.expand(len(keys))
    except (RuntimeError, IndexError, TypeError):
        return None


def _probe_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - built from our own positions instead
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **other: Any,
) -> tuple[torch.Tensor, None]:
    for name, what in _REFUSED.items():
        if other.get(name) is not None:
            raise ModelError(f"the model needs {what}, which is not supported")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ModelError("the model's attention is not causal")
    if key.shape != value.shape:
        raise ModelError("keys and values of different sizes (latent attention) are not supported")
    if query.shape[2] != key.shape[2] or query.shape[3] != key.shape[3]:
        raise ModelError("attention over other than the layer's own keys is not supported")
    form = Form(_scale(query, scaling), sliding_window, softcap)
    index: int = module.layer_idx  # type: ignore[assignment]
    _PROBE.get().layers[index] = Layer(query.shape[1], key.shape[1], key.shape[3], form, s_aux is not None)
    return _plain_attention(query, key, value, form, s_aux).transpose(1, 2), None


def _plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, form: Form, sinks: torch.Tensor | None
) -> torch.Tensor:
    """By the definition, in float32: query [1, head, row, dim], key and value [1, kv_head, row, dim] → like query."""
    group, rows = query.shape[1] // key.shape[1], query.shape[2]
    keys, values = (x.float().repeat_interleave(group, 1) for x in (key, value))
    scores = query.float() @ keys.mT * form.scale
    if form.softcap is not None:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    distance = torch.arange(rows)[:, None] - torch.arange(rows)
    seen = (distance >= 0) & (distance < (form.window or rows))
    scores = scores.masked_fill(~seen.to(scores.device), -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().view(1, -1, 1, 1).expand(1, -1, rows, 1)), dim=-1)
    return (scores.softmax(-1)[..., :rows] @ values).to(query.dtype)


def _serve_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **other: Any,  # noqa: ARG001 - the probe saw that nothing else matters
) -> tuple[torch.Tensor, None]:
    batch, abandon = _BATCH.get()
    if abandon is not None and abandon.is_set():
        raise Abandoned
    form = Form(_scale(query, scaling), sliding_window, softcap)
    layer: int = module.layer_idx  # type: ignore[assignment]
    return batch.attend(layer, query, key, value, form, s_aux), None


def _scale(query: torch.Tensor, scaling: float | None) -> float:
    return query.shape[3] ** -0.5 if scaling is None else float(scaling)


def _note_mask(*, mask_function: Callable[..., Any], **_: Any) -> None:
    """The mask function of PROBE: notes what is asked for and builds nothing."""
    if (probe := _PROBE.get(None)) is not None:
        probe.masks.append(mask_function)


def register() -> None:
    """Make both known to transformers; harmless to repeat."""
    AttentionInterface.register(PROBE, _probe_attention)
    AttentionMaskInterface.register(PROBE, _note_mask)
    AttentionInterface.register(SERVE, _serve_attention)


def run_probe(net: torch.nn.Module) -> Probe:
    """One forward over a few tokens; `net` must have been loaded with attn_implementation=PROBE."""
    probe = Probe()
    token = _PROBE.set(probe)
    try:
        with torch.inference_mode(), next(net.parameters()).device:
            ids, positions = torch.tensor([PROBE_IDS]), torch.arange(len(PROBE_IDS)).unsqueeze(0)
            logits = net(input_ids=ids, position_ids=positions, use_cache=False).logits
            probe.logits = logits[0].float().cpu()
    finally:
        _PROBE.reset(token)
    return probe
