"""Norms and activations that give a row the same bits whatever is computed beside it, and do it quickly.

torch's own SiLU, GELU and sigmoid round the last few elements of a range differently from the rest (vector code
and its scalar remainder), and where ranges end depends on the number of rows and threads. exp, erf and
tanh do not, and arithmetic is rounded correctly everywhere, so the activations are written out in those.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

Function = Callable[[torch.Tensor], torch.Tensor]


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + e^-x), in float32."""
    wide = x.float()
    below = torch.exp(-wide).add_(1.0)
    return torch.div(wide, below, out=below).to(x.dtype)


def gelu(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (torch.erf(wide * math.sqrt(0.5)).add_(1.0).mul_(wide).mul_(0.5)).to(x.dtype)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    inner = (wide * wide).mul_(0.044715).add_(1.0).mul_(wide).mul_(math.sqrt(2.0 / math.pi))
    return torch.tanh(inner).add_(1.0).mul_(wide).mul_(0.5).to(x.dtype)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(-x.float()).add_(1.0).reciprocal_().to(x.dtype)


def clamped_swiglu(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """GPT-OSS's gate over gate and up values that alternate in the last dimension."""
    gate, up = x[..., ::2].float().clamp(max=limit), x[..., 1::2].float().clamp(-limit, limit)
    return (gate / torch.exp(gate * -alpha).add_(1.0) * (up + 1.0)).to(x.dtype)


#: By numbers: an activation is replaced by the first of these that agrees with it on a probe.
_ACTIVATIONS: tuple[Function, ...] = (silu, gelu, gelu_tanh)


class Activation(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, in float32, rounded once."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.width = weight.shape[0]
        self.weight, self.eps = weight.detach().float(), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x.float(), (self.width,), self.weight, self.eps).to(x.dtype)


def replace_rowwise(net: nn.Module) -> int:
    """Replace RMSNorms and activations under `net` where ours agree with them; how many were replaced."""
    count = 0
    for module in list(net.modules()):
        for name, child in list(module.named_children()):
            ours = _norm_for(child) or _activation_for(name, child)
            if ours is not None:
                setattr(module, name, ours)
                count += 1
    return count


def _activation_for(name: str, module: nn.Module) -> Activation | None:
    if "act" not in name or any(True for _ in module.parameters()):
        return None
    probe = torch.linspace(-6.0, 6.0, 97)
    try:
        expected = module(probe)
    except (RuntimeError, TypeError, AttributeError):
        return None
    for function in _ACTIVATIONS:
        if expected.shape == probe.shape and torch.allclose(function(probe), expected, atol=2e-6, rtol=2e-6):
            return Activation(function)
    return None


def _norm_for(module: nn.Module) -> RMSNorm | None:
    """Ours with the module's weight, or with 1 + weight as Gemma has it: whichever agrees."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or weight is None or weight.ndim != 1 or eps is None:
        return None
    probe = torch.randn(3, weight.shape[0], generator=torch.Generator().manual_seed(0)).to(weight)
    expected = module(probe)
    tolerance = 1e-5 if weight.dtype == torch.float32 else 2e-2
    for candidate in (weight.detach().float(), 1.0 + weight.detach().float()):
        ours = RMSNorm(candidate, eps)
        if torch.allclose(ours(probe).float(), expected.float(), atol=tolerance, rtol=tolerance):
            return ours
    return None
