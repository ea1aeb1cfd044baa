"""Mixtures of experts whose rows do not depend on which other rows chose the same expert.

Three things of transformers' own would let them: the router's product, the experts' products, whose number of rows is
how many tokens chose an expert, and the order in which a token's experts are summed. Here all products are
packed ones (see `linear.py`), and a token's experts are summed in the order of their rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, sigmoid
from torch.overrides import TorchFunctionMode

from . import rowwise
from .linear import Kernel, pack
from .native.lib import Kernels

#: What experts make of the product with both their gate and their up weights.
Gate = Callable[[torch.Tensor], torch.Tensor]


class PackedExperts(nn.Module):
    """Takes the place of an experts module of transformers: hidden [tokens, width], index and weights [tokens, k].

    `experts` stays a child for its activation and gate; its weights are let go.
    """

    def __init__(self, experts: Any, kernels: Kernels | None = None) -> None:
        super().__init__()
        first = "gate_up_proj" if experts.has_gate else "up_proj"
        self.count: int = experts.num_experts
        self.inner = experts
        self._enter = _pack_each(experts, first, kernels)
        self._leave = _pack_each(experts, "down_proj", kernels)
        self._gate: Gate = _gate_of(experts)
        self.width, self.inner_width = _sizes(experts, first)

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens, k = index.shape
        chosen = index.reshape(-1)
        order = chosen.argsort(stable=True)
        rows = hidden[order // k].split(chosen.bincount(minlength=self.count).tolist())
        outs = [self._expert(number, part) for number, part in enumerate(rows) if len(part)]
        slots = hidden.new_empty(tokens * k, hidden.shape[-1])
        slots[order] = torch.cat(outs)
        ranked = (slots.view(tokens, k, -1).float() * weights.unsqueeze(-1).float()).unbind(1)
        total = ranked[0]
        for part in ranked[1:]:
            total = total + part
        return total.to(hidden.dtype)

    def _expert(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        return self._leave[number](self._gate(self._enter[number](rows)))


def _pack_each(experts: Any, name: str, kernels: Kernels | None) -> list[Kernel]:
    weight, bias = getattr(experts, name), getattr(experts, name + "_bias", None)
    turned = weight.transpose(1, 2) if experts.is_transposed else weight  # [expert, out, in]
    return [pack(turned[i], None if bias is None else bias[i], kernels) for i in range(experts.num_experts)]


def _sizes(experts: Any, first: str) -> tuple[int, int]:
    shape = getattr(experts, first).shape[1:]
    return (shape[0], shape[1]) if experts.is_transposed else (shape[1], shape[0])


def _gate_of(experts: Any) -> Gate:
    """The module's own, written out row-invariantly where we know it."""
    if not experts.has_gate:
        return lambda x: experts.act_fn(x)  # looked up late: it is replaced, too
    own: Gate = experts._apply_gate
    alpha, limit = getattr(experts, "alpha", None), getattr(experts, "limit", None)
    if alpha is not None and limit is not None:
        probe = torch.linspace(-9.0, 9.0, 98)

        def ours(x: torch.Tensor) -> torch.Tensor:
            return rowwise.clamped_swiglu(x, alpha, limit)

        if torch.allclose(ours(probe), own(probe), atol=2e-6, rtol=2e-6):
            return ours
    return own


class Mixture:
    """Takes the place of `forward` of a block with a router and experts: the same, but row-invariant.

    Products with a router's weight go through packed kernels, and sigmoids are written out, since torch's
    rounds the last few of a tensor's elements differently.
    """

    def __init__(self, block: Any, kernels: Kernels | None = None) -> None:
        self._own = block.forward
        self._native = kernels
        self._kernels: dict[tuple[torch.Size, torch.dtype], Kernel] = {}
        self.width = next(child.width for child in block.children() if isinstance(child, PackedExperts))
        for module in _routers(block):
            weight = module.weight.detach()
            del module.weight  # no parameter of an unknown kind any more
            module.register_buffer("weight", weight)
            self._kernels[weight.shape, weight.dtype] = pack(weight, None, self._native, whole=True)
        self._shapes = {shape for shape, _ in self._kernels}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _Rerouted(self):
            return self._own(*args, **kwargs)

    def concerns(self, weight: torch.Tensor) -> bool:
        return weight.shape in self._shapes

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        kind = weight.shape, weight.dtype
        if kind not in self._kernels:  # some routers compute in float32 what is kept in bfloat16
            self._kernels[kind] = pack(weight, None, self._native, whole=True)
        out = self._kernels[kind](x)
        return out if bias is None else out + bias

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """x [1, rows, width] → [1, rows, width], for the self-test."""
        given = self(x)
        out: torch.Tensor = given[0] if isinstance(given, tuple) else given
        return out


def _routers(block: nn.Module) -> list[Any]:
    """Modules of the block that multiply by a weight [out, in] themselves; those of one size are not told apart."""
    found: dict[torch.Size, list[Any]] = {}
    for module in block.modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.ndim == 2 and type(module) is not nn.Linear:
            found.setdefault(weight.shape, []).append(module)
    return [modules[0] for modules in found.values() if len(modules) == 1]


class _Rerouted(TorchFunctionMode):
    """Sends what a mixture computes itself to its row-invariant ways."""

    def __init__(self, mixture: Mixture) -> None:
        super().__init__()
        self._mixture = mixture

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is linear and len(args) > 1 and self._mixture.concerns(args[1]):
            return self._mixture.product(*args, **kwargs)
        if func in (torch.sigmoid, torch.Tensor.sigmoid, sigmoid):
            return rowwise.sigmoid(*args)
        return func(*args, **kwargs)


def replace_experts(
    net: nn.Module, let_go: Callable[[int], None] = lambda _: None, kernels: Kernels | None = None
) -> int:
    """Put ours in the place of all experts under `net` that agree with them; how many blocks of them there were."""
    count = 0
    for module in list(net.modules()):
        for name, child in list(module.named_children()):
            if _is_experts(child) and _agree(ours := PackedExperts(child, kernels), child):
                let_go(_drop_weights(child))
                setattr(module, name, ours)
                module.forward = Mixture(module, kernels)  # of this one instance
                count += 1
    return count


def _drop_weights(module: nn.Module) -> int:
    """Let the module's own weights go; how many bytes they took."""
    nbytes = 0
    for name, weight in list(module.named_parameters(recurse=False)):
        nbytes += weight.nbytes
        setattr(module, name, None)
    return nbytes


def _is_experts(module: nn.Module) -> bool:
    """Whether it is of the kind that transformers lets others compute: stacked weights and facts about them."""
    facts = ("has_gate", "is_transposed", "num_experts", "down_proj")
    return all(hasattr(module, fact) for fact in facts) and not getattr(module, "has_post_expert_norm", False)


def _agree(ours: PackedExperts, theirs: nn.Module) -> bool:
    """Whether both give the same for a few random rows, as far as their dtype can say."""
    generator, dtype = torch.Generator().manual_seed(0), ours.inner.down_proj.dtype
    x = torch.randn(3, ours.width, generator=generator).to(dtype)
    k = min(2, ours.count)
    index = torch.stack([torch.randperm(ours.count, generator=generator)[:k] for _ in range(3)])
    weights = torch.rand(3, k, generator=generator).to(dtype)
    expected = theirs(x, index, weights).float()
    tolerance = (1e-4 if dtype == torch.float32 else 4e-2) * float(expected.abs().max())
    return torch.allclose(ours(x, index, weights).float(), expected, atol=tolerance, rtol=0)
