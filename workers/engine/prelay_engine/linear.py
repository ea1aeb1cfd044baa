"""Linear layers with prepacked weights, whose rows do not depend on how many rows are computed at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from .native.lib import Kernels

#: Of one hidden state: what several linears that read it are fused into gives all their outputs.
Kernel = Callable[[torch.Tensor], torch.Tensor]


class Makes(Protocol):
    """What computes linears elsewhere than on this CPU."""

    def made(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Kernel:
        """A kernel as `pack` describes it, for weight [out, in] and bias [out]."""


def native_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 matrices on this CPU at all."""
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(
    weight: torch.Tensor, bias: torch.Tensor | None, kernels: Kernels | Makes | None = None, whole: bool = False
) -> Kernel:
    """A kernel x [..., in] → [..., out] in the dtype of `weight` [out, in], whose rows depend on their row of x only.

    `whole`: in that dtype also where kernels keep weights in eight bits. Without `kernels` it is oneDNN's. With one row
    that may split the sum differently, so one row is run as two. bfloat16 on a CPU that cannot multiply it is computed
    on the same values in float32 and rounded once: the same accumulation.
    """
    if kernels is not None and not isinstance(kernels, Kernels):
        return kernels.made(weight, bias)
    if kernels is not None and weight.dtype in kernels.dtypes:
        mine, wide = kernels.pack(weight, whole), None if bias is None else bias.detach().float()
        return lambda x: kernels.linear(x, mine, wide)
    narrow = weight.dtype == torch.bfloat16 and not native_bfloat16()
    if narrow:
        weight, bias = weight.float(), None if bias is None else bias.float()
    if not torch.backends.mkldnn.is_available():
        return _twice(_widened(_plain(weight, bias)) if narrow else _plain(weight, bias))
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
    linear = torch.ops.mkldnn._linear_pointwise.default
    bias = None if bias is None else bias.detach().clone()

    def run(x: torch.Tensor) -> torch.Tensor:
        return linear(x, packed, bias, "none", [], "")  # type: ignore[no-any-return]

    return _twice(_widened(run) if narrow else run)


def _plain(weight: torch.Tensor, bias: torch.Tensor | None) -> Kernel:
    weight = weight.detach().clone()
    return lambda x: nn.functional.linear(x, weight, bias)


def _widened(kernel: Kernel) -> Kernel:
    return lambda x: kernel(x.float()).to(torch.bfloat16)


class PackedLinear(nn.Module):
    """Takes the place of an nn.Linear with this `weight` [out, in] and `bias`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, kernels: Kernels | Makes | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._kernel = pack(weight, bias, kernels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernel(x)


class FusedGroup:
    """Several linears that read the same tensor, run as one product.

    Whichever part is asked first computes for all; the others take their slice when they are given the
    same tensor object, and a different one is computed anew. Nothing is kept once all have taken theirs.
    """

    def __init__(self, linears: Sequence[nn.Linear], kernels: Kernels | Makes | None = None) -> None:
        weight = torch.cat([linear.weight.detach() for linear in linears])
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self._kernel = pack(weight, torch.cat(biases) if biases else None, kernels)
        self._sizes = [linear.out_features for linear in linears]
        self.width = sum(self._sizes)
        self._input: torch.Tensor | None = None
        self._parts: dict[int, torch.Tensor] = {}

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """All outputs side by side."""
        return self._kernel(x)

    def take(self, part: int, x: torch.Tensor) -> torch.Tensor:
        if x is not self._input or part not in self._parts:
            outputs = self.whole(x).split(self._sizes, dim=-1)
            self._input, self._parts = x, dict(enumerate(outputs))
        taken = self._parts.pop(part)
        if not self._parts:
            self._input = None
        return taken


class FusedPart(nn.Module):
    """Takes the place of one nn.Linear of a fused group."""

    def __init__(self, group: FusedGroup, part: int, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.group, self._part = group, part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.take(self._part, x)


def _twice(kernel: Kernel) -> Kernel:
    """`kernel` on x [..., in], a single row as two equal ones."""

    def run(x: torch.Tensor) -> torch.Tensor:
        if x.numel() > x.shape[-1]:
            return kernel(x)
        return kernel(x.reshape(1, -1).expand(2, -1))[:1].view(*x.shape[:-1], -1)

    return run


#: Children of one module that read the same tensor in every architecture that has them.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def replace_linears(
    net: nn.Module, let_go: Callable[[int], None] = lambda _: None, kernels: Kernels | Makes | None = None
) -> int:
    """Put packed linears in the place of all nn.Linear under `net`, fused where possible; how many there were.

    The originals' weights are let go one module at a time, so that little is held twice; `let_go` is told the bytes.
    """
    count = 0
    # Without the linears themselves: a list that held them would hold their weights to the end.
    for module in [module for module in net.modules() if any(True for _ in module.children())]:
        for names in _FUSED:
            linears = [child for child in (getattr(module, name, None) for name in names) if type(child) is nn.Linear]
            if len(linears) == len(names) and _alike(linears):
                group = FusedGroup(linears, kernels)
                for part, (name, linear) in enumerate(zip(names, linears, strict=True)):
                    setattr(module, name, FusedPart(group, part, linear))
                count += len(names)
                let_go(sum(linear.weight.nbytes for linear in linears))
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, PackedLinear(child.weight, child.bias, kernels))
                count += 1
                let_go(child.weight.nbytes)
            elif type(child) is Conv1D:  # GPT-2's name for a linear with its weight the other way round
                setattr(module, name, PackedLinear(child.weight.T, child.bias, kernels))
                count += 1
                let_go(child.weight.nbytes)
    return count


def _alike(linears: Sequence[nn.Linear]) -> bool:
    first = linears[0]
    return all(
        linear.in_features == first.in_features
        and linear.weight.dtype == first.weight.dtype
        and (linear.bias is None) == (first.bias is None)
        for linear in linears
    )
