"""A small network that tests look at: one tensor read three times, two outputs."""

from __future__ import annotations

import torch

from intarsia.network import Layer, Network, Tensor, net_guard
from intarsia.network import functional as F


def diamond() -> Network:
    net = Network("diamond")
    with net_guard(net):
        a = Tensor("a", torch.float32, (2, "n"))
        b = Tensor("b", torch.float32, (2, "n"))
        total = a + b
        (F.relu(total) * total).mark_output("y")
        F.neg(total).mark_output("z")
    return net


def layer(net: Network, name: str) -> Layer:
    found = net.get_layer_by_name(name)
    assert found is not None
    return found
