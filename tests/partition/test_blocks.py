"""The work a node is worth, and what its weights take."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from intarsia.graph.nodes import compute_nodes, op_name
from intarsia.partition.blocks import split_by_weight, too_small, weights_of, work

from .graphs import lower

A, B = torch.rand(1000, 500), torch.rand(500, 1000)


class Ops(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


@pytest.mark.parametrize(
    ("function", "args", "op", "megaflops"),
    [
        (torch.mm, (A, B), "mm", 1000),
        (lambda x, y: torch.addmm(x[:, :1], x, y), (A, B), "addmm", 1000),
        (nn.Conv2d(3, 8, 3, padding=1), (torch.rand(1, 3, 100, 100),), "convolution", 2 * 8 * 27 * 1e4 / 1e6),
        (nn.ConvTranspose2d(3, 8, 3), (torch.rand(1, 3, 100, 100),), "convolution", 2 * 3 * 72 * 1e4 / 1e6),
    ],
)
def test_contractions_count_their_flops(function, args, op: str, megaflops: float) -> None:
    gm = lower(function if isinstance(function, nn.Module) else Ops(function), args)
    node = next(node for node in compute_nodes(gm.graph) if f".{op}." in op_name(node))
    written = node.meta["val"].nbytes / 2**20
    assert work(node) == pytest.approx(4 + megaflops + written)


def test_views_are_nothing_and_small_ops_are_one() -> None:
    gm = lower(Ops(lambda x: x.view(-1).sin()), (torch.rand(2, 2),))
    view, sin = compute_nodes(gm.graph)
    assert work(view) == 0 and work(sin) == pytest.approx(1, abs=1e-4)
    assert too_small([sin], 2) == "its segment has 1 op, and min_block_size=2"
    assert too_small([sin, view], 2) is None


def test_weights_are_seen_through_views_and_counted_once() -> None:
    gm = lower(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.rand(1, 4),))
    products = [node for node in compute_nodes(gm.graph) if "mm" in node.name]
    assert [sum(weights_of(node).values()) for node in products] == [80, 80]
    assert len(split_by_weight([[node] for node in products], 160)) == 1
    assert len(split_by_weight([[node] for node in products], 159)) == 2
    assert len(split_by_weight([[products[0]], [products[0]]], 80)) == 1
