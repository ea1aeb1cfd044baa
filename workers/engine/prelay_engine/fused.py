"""Decoders of the common kind as one native call a step, in the place of transformers' layers.

The common kind: RMSNorm, attention with rotary positions, RMSNorm, a gated product. The type of a model and the parts
it is made of decide whether it is tried, and numbers decide whether it is used: the logits of a short text must
be those that transformers' own layers gave at load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .attention import Span
from .backend import Layer
from .flag import Flag
from .kv import KvStore
from .native.lib import Kernels, LayerArgs, NetArgs, Spans
from .rowwise import Activation, RMSNorm, gelu_tanh, silu

_TYPES = {"llama", "mistral", "qwen2", "qwen3"}
_BLOCK = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_GELU = {silu: 0, gelu_tanh: 1}


class Fused:
    """The layers, the head and the embedding of one model, packed. Not thread-safe."""

    def __init__(self, net: Any, layers: Sequence[Layer], kernels: Kernels, let_go: Callable[[int], None]) -> None:
        """Takes the layers and the head out of `net`, which must be `fusible`; its weights are let go one by one."""
        base = net.base_model
        self._kernels = kernels
        self._rotary = base.rotary_emb
        self._kept: list[torch.Tensor] = []
        self.dtype: torch.dtype = net.dtype
        args = (LayerArgs * len(layers))()
        first = base.layers[0]
        inner, gelu = first.mlp.gate_proj.out_features, _GELU[first.mlp.act_fn.function]
        eps = base.norm.eps
        embedding = self._keep(base.embed_tokens.weight)
        head = kernels.pack(net.lm_head.weight)
        for index, layer in enumerate(layers):
            args[index] = self._layer(base.layers[index], layer, let_go)
            base.layers[index] = nn.Identity()
        net.lm_head = nn.Identity()
        shape = (len(layers), embedding.shape[1], layers[0].heads, layers[0].kv_heads, layers[0].head_dim, inner)
        addresses = (embedding.data_ptr(), head.address, self._keep(base.norm.weight.float()).data_ptr())
        scale = layers[0].form.scale
        self._args = NetArgs(*shape, embedding.shape[0], args, *addresses, eps, scale, gelu, kernels.eight)

    def _layer(self, block: Any, layer: Layer, let_go: Callable[[int], None]) -> LayerArgs:
        attention, mlp = block.self_attn, block.mlp
        qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
        weights = (
            torch.cat([linear.weight.detach() for linear in qkv]),
            *(linear.weight for linear in (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)),
        )
        packed = [self._kernels.pack(weight).address for weight in weights]
        qkv_bias = None if qkv[0].bias is None else torch.cat([linear.bias.detach() for linear in qkv])
        small = (
            qkv_bias,
            attention.o_proj.bias,
            block.input_layernorm.weight,
            block.post_attention_layernorm.weight,
            *(getattr(getattr(attention, name, None), "weight", None) for name in ("q_norm", "k_norm")),
        )
        kept = [None if x is None else self._keep(x.detach().float()).data_ptr() for x in small]
        let_go(sum(weight.nbytes for weight in weights))
        return LayerArgs(*packed, *kept, layer.form.window or 0)

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self._kept.append(tensor.detach().contiguous())
        return self._kept[-1]

    def forward(
        self,
        store: KvStore,
        spans: Sequence[Span],
        ids: Sequence[int],
        positions: Sequence[int],
        wanted: Sequence[int],
        abandon: Flag | None = None,
    ) -> torch.Tensor:
        """As `Model.forward`; `positions` are those of the rows."""
        where = Spans([(span.start, span.length, store.place(span.key)) for span in spans])
        cosines, sines = self._rotary(_NO_DATA, torch.tensor([positions]))
        return self._kernels.step(
            self._args, self.dtype, where, ids, cosines[0].contiguous(), sines[0].contiguous(), wanted, abandon
        )


#: Tells the rotary embedding the dtype of what it gives: float32 also for a model of bfloat16, so it is rounded once.
_NO_DATA = torch.zeros(1)


def fusible(net: Any, layers: Sequence[Layer]) -> bool:
    """Whether `net`, its norms and activations already replaced, is built of what the kernels compute."""
    base, head = net.base_model, getattr(net, "lm_head", None)
    parts = ("embed_tokens", "layers", "norm", "rotary_emb")
    if net.config.model_type not in _TYPES or not all(hasattr(base, name) for name in parts):
        return False
    ends = type(base.embed_tokens) is nn.Embedding and type(head) is nn.Linear and head.bias is None
    alike = len({(layer.heads, layer.kv_heads, layer.head_dim, layer.form.scale) for layer in layers}) == 1
    plain = all(layer.form.softcap is None and not layer.sinks for layer in layers)
    return ends and alike and plain and layers[0].head_dim % 2 == 0 and _blocks_fit(base)


def _blocks_fit(base: Any) -> bool:
    if not isinstance(base.norm, RMSNorm) or not all(map(_block_fits, base.layers)):
        return False
    norms = [module for module in base.modules() if isinstance(module, RMSNorm)]
    acts = {block.mlp.act_fn.function for block in base.layers}
    widths = {block.mlp.gate_proj.out_features for block in base.layers}
    return len({norm.eps for norm in norms}) == 1 and len(acts) == 1 and acts <= set(_GELU) and len(widths) == 1


def _block_fits(block: Any) -> bool:
    if _children(block) != _BLOCK or _children(block.mlp) != _GATED or not isinstance(block.mlp.act_fn, Activation):
        return False
    attention = _children(block.self_attn)
    if not _ATTENTION <= attention <= _ATTENTION | _HEAD_NORMS:
        return False
    linears = [getattr(block.self_attn, name) for name in _ATTENTION]
    linears += [getattr(block.mlp, name) for name in _GATED - {"act_fn"}]
    if not all(type(linear) is nn.Linear for linear in linears):
        return False
    gated_bias = any(getattr(block.mlp, name).bias is not None for name in _GATED - {"act_fn"})
    qkv = {getattr(block.self_attn, name).bias is None for name in ("q_proj", "k_proj", "v_proj")}
    norms = [block.input_layernorm, block.post_attention_layernorm]
    norms += [getattr(block.self_attn, name) for name in attention & _HEAD_NORMS]
    return not gated_bias and len(qkv) == 1 and all(isinstance(norm, RMSNorm) for norm in norms)


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}
