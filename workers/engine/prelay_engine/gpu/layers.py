"""Layers of transformers' classes, replaced by what runs well on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..linear import Kernel, replace_linears
from ..rowwise import Activation, RMSNorm, gelu, gelu_tanh, replace_rowwise, silu
from .kernels.linear import linear
from .kernels.norm import rms_norm
from .kernels.silu import Name, silu_mul

_ACTIVATIONS: dict[Callable[..., Any], Name] = {silu: "silu", gelu: "gelu", gelu_tanh: "gelu_tanh"}
_GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class Linears:
    """Products of rows and weights: cuBLAS's, or with `exact` ours, in which a row does not depend on the others."""

    def __init__(self, *, exact: bool) -> None:
        self.exact = exact

    def made(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Kernel:
        """x [..., in] → [..., out]; the weight is used where it lies."""
        weight = weight.detach().contiguous()
        bias = None if bias is None else bias.detach().to(weight.dtype)
        if not self.exact:
            return lambda x: nn.functional.linear(x, weight, bias)
        return lambda x: linear(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)


class Norm(nn.Module):
    """An RMSNorm in one kernel."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight.contiguous(), norm.eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.flatten(0, -3) if x.ndim > 3 else x  # [1, row, head, dim]: a view
        return rms_norm(heads, self.weight, self.eps).view(x.shape)


class GatedMlp(nn.Module):
    """act(gate(x)) · up(x), then down: both first products in one, gate and product in one kernel."""

    def __init__(self, mlp: nn.Module, linears: Linears) -> None:
        super().__init__()
        gate, up, down, act = (getattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn"))
        bias = None if gate.bias is None else torch.cat([gate.bias, up.bias])
        self._gate_up = linears.made(torch.cat([gate.weight.detach(), up.weight.detach()]), bias)
        self._down = linears.made(down.weight, down.bias)
        self._activation = _ACTIVATIONS[act.function]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self._gate_up(x.reshape(-1, x.shape[-1]))
        return self._down(silu_mul(rows, self._activation)).view(*x.shape[:-1], -1)


def replace_layers(net: nn.Module, linears: Linears) -> None:
    """Replace norms, gated MLPs and linears under `net`, whose weights lie on the device already."""
    replace_rowwise(net)
    _replace_within(net, linears)
    replace_linears(net, kernels=linears)


def _replace_within(module: nn.Module, linears: Linears) -> None:
    """One after the other, and no list of them all: it would hold the weights of all MLPs twice to its end."""
    for name, child in list(module.named_children()):
        if _is_gated(child):
            setattr(module, name, GatedMlp(child, linears))
        elif isinstance(child, RMSNorm):
            setattr(module, name, Norm(child))
        else:
            _replace_within(child, linears)


def _is_gated(module: nn.Module) -> bool:
    children = dict(module.named_children())
    if set(children) != _GATED or not isinstance(children["act_fn"], Activation):
        return False
    gate, up, down = (children[name] for name in ("gate_proj", "up_proj", "down_proj"))
    plain = all(type(child) is nn.Linear for child in (gate, up, down))
    return plain and (gate.bias is None) == (up.bias is None) and children["act_fn"].function in _ACTIVATIONS


def has_experts(net: nn.Module) -> bool:
    """Whether rows go to experts, chosen on the host: no CUDA graph can hold that, and their products are not ours."""
    return any(weight.ndim > 2 for module in net.modules() for weight in module.parameters(recurse=False))
