"""Transformers' layers give way to ours one by one: a card has no room for all weights twice."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from prelay_engine.gpu.layers import GatedMlp, Linears, Norm, replace_layers
from prelay_engine.linear import Kernel
from tests.unit.engine.conftest import tiny_network

LAYERS = 5


class Watched(Linears):
    """Counts, whenever a product is made, how many of the network's own matrices are still there."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(exact=False)
        self._own = [weakref.ref(weight) for name, weight in net.named_parameters() if name.endswith("proj.weight")]
        self.left: list[int] = []

    def made(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Kernel:
        self.left.append(sum(own() is not None for own in self._own))
        return super().made(weight, bias)


def test_each_mlps_weights_are_let_go_before_the_next_ones_are_joined() -> None:
    net = tiny_network("llama", num_hidden_layers=LAYERS)
    watched = Watched(net)
    with torch.no_grad():
        replace_layers(net, watched)
    # Of a layer three go with its MLP, whose gate and up weights are joined first, and its down weight used as it lies.
    assert watched.left[: 2 * LAYERS : 2] == [7 * LAYERS - 3 * layer for layer in range(LAYERS)]


def test_the_norms_and_mlps_of_a_network_are_ours_afterwards() -> None:
    net = tiny_network("llama", num_hidden_layers=2)
    with torch.no_grad():
        replace_layers(net, Linears(exact=False))
    kinds = [type(module) for module in net.modules()]
    assert kinds.count(GatedMlp) == 2
    assert kinds.count(Norm) == 5
    assert nn.Linear not in kinds
