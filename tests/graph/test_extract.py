"""Pieces of awkward graphs: loops, scalars born of data, integer inputs, random order, shared weights."""

from __future__ import annotations

import pytest
import torch
from tests.functions import Function
from tests.partition.graphs import equal, lower, refuse, run_pieces, table_by
from torch import nn

from intarsia.graph.nodes import compute_nodes, op_name
from intarsia.partition import STRATEGIES, PartitionOptions, Plan, Segment, SupportTable, dependency, extract

ONE = PartitionOptions(min_block_size=1)
X = torch.rand(4, 4) + 0.5


def check(gm, table, *calls: tuple) -> Plan:
    """Every strategy: a valid plan, standing pieces, equal answers; the default strategy's plan."""
    for strategy in STRATEGIES.values():
        plan = strategy(gm, table, ONE).verify(gm)
        pieces = extract(gm, plan)
        for args in calls:
            torch.manual_seed(0)
            expected = gm(*args)
            torch.manual_seed(0)
            answers = run_pieces(gm, pieces, args)
            assert len(answers) == len(expected) and all(map(equal, answers, expected))
    return dependency(gm, table, ONE)


def test_while_loop_and_scan_stand_alone() -> None:
    def loop(x):
        count = torch.zeros((), dtype=torch.int64)
        _, x = torch.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin()), (count, x.exp()))
        return x.cos()

    gm = lower(Function(loop), (X,))
    plan = check(gm, refuse(gm, "while_loop"), (X,))
    assert [op_name(n) for s in plan.segments if s.do_not_merge for n in s.nodes] == ["while_loop"]


def test_scan_stands_alone() -> None:
    scan = pytest.importorskip("torch._higher_order_ops.scan").scan

    def run(x):
        carry, ys = scan(lambda c, y: (c + y, (c * y).sin()), torch.zeros(4), x.exp(), dim=0)
        return carry.cos(), ys.cos()

    gm = lower(Function(run), (X,))
    plan = check(gm, refuse(gm, "scan"), (X,))
    assert [op_name(n) for s in plan.segments if s.do_not_merge for n in s.nodes] == ["scan"]


def test_a_number_born_of_data_crosses_alone() -> None:
    def run(x):
        rows = x.sum().to(torch.int64).item()
        torch._check(rows >= 2)
        torch._check(rows <= 100)
        return torch.arange(rows).sin().cos()

    gm = lower(Function(run), (X,))
    table = table_by(
        gm,
        lambda n: "a" if op_name(n).split(".")[1] in ("sin", "cos", "sum") else "pytorch",
        ("a", "pytorch"),
    )
    check(gm, table, (X,), (X + 1,))


def test_sizes_that_only_data_knows() -> None:
    gm = lower(Function(lambda x: (x.nonzero().sin().reshape(-1).cos(), x.exp())), (X,))
    plan = check(gm, refuse(gm, "nonzero", "cos"), (X,), (torch.eye(4),))
    assert plan.count("a") >= 1


def test_an_integer_input() -> None:
    dynamic = ({0: torch.export.Dim.DYNAMIC}, torch.export.Dim.DYNAMIC)
    gm = lower(Function(lambda x, n: torch.lgamma(x * n).sin() + n), ((X, 7)), dynamic_shapes=(dynamic,))
    check(gm, refuse(gm, "lgamma"), (X, 7), (torch.rand(6, 4), 3))


def test_a_returned_size_constant_and_input() -> None:
    model = Function(lambda x: (x.shape[0] * 2, x, torch.lgamma(x).sin(), 5, None))
    gm = lower(model, (X,), dynamic_shapes=(({0: torch.export.Dim.DYNAMIC},),))
    check(gm, refuse(gm, "lgamma"), (X,), (torch.rand(9, 4),))


def test_random_numbers_are_drawn_in_the_order_written() -> None:
    def run(x):
        a = torch.rand_like(x)
        b = torch.rand_like(torch.lgamma(x.sin()))
        c = torch.rand_like(x)
        return a, b.cos(), c

    gm = lower(Function(run), (X,))
    rands = [n for n in compute_nodes(gm.graph) if "rand" in op_name(n)]
    # Alternate the engines of the draws: the order must still be the one written.
    table = table_by(
        gm,
        lambda n: "b" if n is rands[1] else "pytorch" if "lgamma" in n.name else "a",
        ("a", "b", "pytorch"),
    )
    check(gm, table, (X,))


def test_results_of_one_node_go_to_several_segments() -> None:
    def run(x):
        values, places = x.topk(2)
        left, right = values.split(1, 1)
        return torch.lgamma(left) + places, right.sin()

    gm = lower(Function(run), (X,))
    plan = check(gm, refuse(gm, "lgamma", "split"), (X,))
    for piece in extract(gm, plan):
        assert all(isinstance(n.meta["val"], torch.Tensor) for n in (*piece.inputs, *piece.outputs))


def test_weights_are_shared_not_copied_and_do_not_cross() -> None:
    gm = lower(Tied(), (X,))
    plan = check(gm, refuse(gm, "lgamma"), (X,))
    pieces = extract(gm, plan)
    weight = gm.get_parameter("linear.weight").data_ptr()
    held = [
        [t.data_ptr() for _, t in (*p.module.named_parameters(), *p.module.named_buffers())] for p in pieces
    ]
    assert [weight in pointers for pointers in held] == [True, False, True]
    assert [len(piece.inputs) for piece in pieces] == [1, 1, 1]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.lgamma(self.linear(x)).sin() @ self.linear.weight.t()


def test_pieces_keep_meta_and_names() -> None:
    gm = lower(Tied(), (X,))
    for piece in extract(gm, dependency(gm, refuse(gm, "lgamma"), ONE)):
        inner = {node.name: node for node in piece.module.graph.nodes}
        for node in (*piece.segment.nodes, *piece.inputs):
            assert inner[node.name].meta["val"] is node.meta["val"]


def test_an_empty_graph() -> None:
    gm = lower(Function(lambda x: x), (X,))
    plan = check(gm, SupportTable(("a", "pytorch")), (X,))
    assert len(plan) == 0 and str(plan) == "Plan by dependency: 0 segments, nothing to run"


def test_a_hand_made_plan_is_cut_too() -> None:
    gm = lower(Function(lambda x: x.sin().cos()), (X,))
    sin, cos = compute_nodes(gm.graph)
    plan = Plan((Segment("a", (sin,)), Segment("a", (cos,)))).verify(gm)
    assert equal(run_pieces(gm, extract(gm, plan), (X,))[0], X.sin().cos())
