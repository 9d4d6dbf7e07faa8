"""The seed's graph and the known segment counts, under every strategy."""

from __future__ import annotations

import io
import operator

import pytest
import torch
from tests.functions import Function
from torch import nn

from intarsia.errors import PartitionError
from intarsia.graph.nodes import compute_nodes, op_name
from intarsia.partition import (
    STRATEGIES,
    PartitionOptions,
    Plan,
    Segment,
    SupportTable,
    dependency,
    extract,
    greedy,
    hierarchical,
)
from intarsia.partition.blocks import split_by_weight, too_small, weights_of, work

from .graphs import Lgamma, equal, lower, refuse, run_pieces, table_by

ONE = PartitionOptions(min_block_size=1)
X, Y = torch.rand(3, 4) + 1, torch.rand(3, 4) + 1


def on_engines(plan: Plan) -> int:
    return sum(segment.engine != "pytorch" for segment in plan.segments)


class ConvBnRelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(x)))


@pytest.mark.parametrize(("strategy", "count"), [("greedy", 7), ("dependency", 3), ("hierarchical", 3)])
def test_the_lgamma_graph(strategy: str, count: int) -> None:
    gm = lower(Lgamma(), (X, Y))
    plan = STRATEGIES[strategy](gm, refuse(gm, "lgamma"), ONE)
    plan.verify(gm)
    assert len(plan) == count
    assert equal(run_pieces(gm, extract(gm, plan), (X, Y))[0], Lgamma()(X, Y))


def test_one_add_is_worth_no_engine_unless_all_must_go() -> None:
    gm = lower(Function(operator.add), (X, Y))
    assert on_engines(dependency(gm, refuse(gm))) == 0
    full = PartitionOptions(require_full_compilation=True)
    assert on_engines(dependency(gm, refuse(gm), full)) == 1


def test_known_counts_with_min_block_size_2() -> None:
    two = PartitionOptions(min_block_size=2)
    gm = lower(Function(lambda x, y: torch.cat([x - y, y]).relu().pow(2)), (X, Y))
    assert on_engines(dependency(gm, refuse(gm), two)) == 1
    gm = lower(Function(lambda x, y: (torch.lgamma((x + y) + y).relu()).pow(2)), (X, Y))
    assert on_engines(dependency(gm, refuse(gm, "lgamma"), two)) == 2
    gm = lower(Function(lambda x, y: (x + y + y + y).relu().pow(2)), (X, Y))
    excluded = PartitionOptions(min_block_size=2, torch_executed_ops=("aten::add",))
    assert on_engines(dependency(gm, refuse(gm), excluded)) == 1


@pytest.mark.parametrize("excluded", [False, True])
def test_known_counts_of_two_engines(excluded: bool) -> None:
    gm = lower(ConvBnRelu(), (torch.rand(1, 3, 8, 8),))
    options = PartitionOptions(
        min_block_size=1,
        backend_priority=("b", "a"),
        backend_support_map={
            "b": ["aten.convolution"],
            "a": ["aten.relu", torch.ops.aten._native_batch_norm_legit_no_training],
        },
        torch_executed_ops=(torch.ops.aten._native_batch_norm_legit_no_training,) if excluded else (),
    )
    plan = hierarchical(gm, SupportTable(("a", "b", "pytorch")), options)
    plan.verify(gm)
    assert (plan.count("b"), plan.count("a"), plan.count("pytorch")) == (2, 2, 2 if excluded else 0)


def test_a_large_product_is_worth_an_engine_and_five_small_relus_are_not() -> None:
    gm = lower(Function(torch.mm), (torch.rand(512, 512), torch.rand(512, 512)))
    assert on_engines(dependency(gm, refuse(gm))) == 1
    gm = lower(Function(lambda x: x.relu().neg().relu().neg().relu()), (X,))
    plan = dependency(gm, refuse(gm))
    assert on_engines(plan) == 0
    assert "its segment of 5 ops has 5.0 units of work; an engine is used from 6" in str(plan)


@pytest.mark.parametrize(
    "name",
    [
        torch.ops.aten.add.Tensor,
        torch.ops.aten.add,
        "aten::add",
        "aten::add.Tensor",
        "torch.ops.aten.add.Tensor",
    ],
)
def test_torch_executed_ops_by_every_name(name: object) -> None:
    gm = lower(Function(lambda x, y: torch.sin(x + y)), (X, Y))
    plan = dependency(gm, refuse(gm), PartitionOptions(min_block_size=1, torch_executed_ops=(name,)))
    add = next(node for node in compute_nodes(gm.graph) if op_name(node) == "aten.add.Tensor")
    assert plan.engine_of(add) == "pytorch"
    assert plan.segments[0].reasons[add] == {"a": "torch_executed_ops names aten.add.Tensor"}
    assert plan.count("a") == 1


def test_a_string_does_not_name_longer_ops() -> None:
    gm = lower(Function(lambda x, y: torch.addmm(x, y, y.t())), (torch.rand(3, 3), torch.rand(3, 4)))
    plan = dependency(gm, refuse(gm), PartitionOptions(min_block_size=1, torch_executed_ops=("aten::add",)))
    assert plan.count("pytorch") == 0


@pytest.mark.parametrize("name", ["aten..add", 3, "a.b.c.d"])
def test_a_name_that_is_none_is_refused(name: object) -> None:
    gm = lower(Function(operator.add), (X, Y))
    with pytest.raises(PartitionError, match="is not the name of an operator"):
        dependency(gm, refuse(gm), PartitionOptions(torch_executed_ops=(name,)))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("name", "ops"),
    [
        (nn.ReLU, ["aten.relu.default"] * 2),
        ("layers.0.1", ["aten.relu.default"]),
        ("layers.*.1", ["aten.relu.default"] * 2),
        ("layers.1", ["aten.permute.default", "aten.addmm.default", "aten.relu.default"]),
        ("no.such.path", []),
    ],
)
def test_torch_executed_modules(name: object, ops: list[str]) -> None:
    gm = lower(Nested(), (X,))
    options = PartitionOptions(min_block_size=1, torch_executed_modules=(name,))
    plan = greedy(gm, refuse(gm), options)
    left = [op_name(n) for s in plan.segments if s.engine == "pytorch" for n in s.nodes]
    assert left == ops


def test_full_compilation_lists_every_refused_node() -> None:
    gm = lower(Lgamma(), (X, Y))
    with pytest.raises(PartitionError) as caught:
        dependency(gm, refuse(gm, "lgamma"), PartitionOptions(require_full_compilation=True))
    text = str(caught.value)
    assert text.startswith("require_full_compilation: 3 nodes cannot run on an engine")
    assert text.count("aten.lgamma.default") == 3
    assert "a: no converter" in text and "at graphs.py:" in text


def test_atomic_chains_are_never_cut_apart() -> None:
    gm = lower(ConvBnRelu(), (torch.rand(1, 3, 8, 8),))
    table = table_by(gm, lambda n: "pytorch" if "relu" in n.name else "a", ("a", "pytorch"))
    chain = ("aten::convolution", "aten::_native_batch_norm_legit_no_training", "aten::relu")
    plan = dependency(gm, table, PartitionOptions(min_block_size=1, atomic=(chain,)))
    assert [s.engine for s in plan.segments] == ["pytorch"]
    conv = plan.segments[0].nodes[0]
    assert plan.segments[0].reasons[conv] == {"a": "it stays with aten.relu.default (no converter)"}


def test_an_atomic_group_with_a_hole_is_an_error() -> None:
    gm = lower(Function(lambda x: x.sin().cos().exp()), (X,))
    ends = [node for node in compute_nodes(gm.graph) if node.name in ("sin", "exp")]
    with pytest.raises(PartitionError, match="a node between them is outside it"):
        dependency(gm, refuse(gm), PartitionOptions(min_block_size=1, atomic=(lambda gm: [ends],)))


def test_a_memory_budget_splits_segments() -> None:
    gm = lower(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), (torch.rand(2, 8),))
    bytes_per_layer = (8 * 8 + 8) * 4
    options = PartitionOptions(min_block_size=1, memory_budget={"a": 2 * bytes_per_layer})
    plan = dependency(gm, refuse(gm), options)
    plan.verify(gm)
    assert [s.engine for s in plan.segments] == ["a", "a"]
    assert all(s.do_not_merge for s in plan.segments)
    x = torch.rand(2, 8)
    assert equal(run_pieces(gm, extract(gm, plan), (x,))[0], gm(x)[0])
    tight = PartitionOptions(min_block_size=1, memory_budget={"a": 100})
    plan = dependency(gm, refuse(gm), tight)
    assert f"its weights take {bytes_per_layer} bytes, and memory_budget is 100" in str(plan)


def test_a_view_of_an_input_costs_nothing() -> None:
    """Both segments read a view of x; each makes it for itself, and nothing but x crosses."""
    gm = lower(Function(lambda x: (torch.sin(x.view(-1)) + 1, torch.lgamma(x.view(-1)))), (X,))
    plan = dependency(gm, refuse(gm, "lgamma"), ONE)
    plan.verify(gm)
    assert len(plan) == 2
    pieces = extract(gm, plan)
    assert [[node.name for node in piece.inputs] for piece in pieces] == [["x"], ["x"]] or all(
        node.op == "placeholder" for piece in pieces for node in piece.inputs
    )


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sin().cos()
        x = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
        return x.exp().sin()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_control_flow_stands_alone(strategy: str) -> None:
    gm = lower(Branch(), (X,))
    plan = STRATEGIES[strategy](gm, refuse(gm, "cond", "exp"), ONE)
    plan.verify(gm)
    alone = [segment for segment in plan.segments if segment.do_not_merge]
    assert [op_name(node) for segment in alone for node in segment.nodes] == ["cond"]
    assert len(plan) == 4  # engine, cond, exp in PyTorch, engine
    for x in (X, -X):
        assert equal(run_pieces(gm, extract(gm, plan), (x,))[0], gm(x)[0])


def test_an_invalid_plan_says_what_is_wrong() -> None:
    gm = lower(Function(lambda x: x.sin().cos().exp()), (X,))
    sin, cos, exp = compute_nodes(gm.graph)
    wrong = {
        "cos.* is in no segment": [(sin, exp)],
        "sin.* is in segments 0 and 1": [(sin, cos, exp), (sin,)],
        "not in graph order": [(cos, sin, exp)],
        "needs cos.*which no earlier segment returns": [(sin, exp), (cos,)],
        "is empty": [(), (sin, cos, exp)],
    }
    for message, groups in wrong.items():
        with pytest.raises(PartitionError, match=message):
            Plan(tuple(Segment("a", nodes) for nodes in groups)).verify(gm)


def test_the_text_is_the_same_every_time() -> None:
    gm = lower(Lgamma(), (X, Y))
    plan = dependency(gm, refuse(gm, "lgamma"), ONE)
    text = str(plan)
    head, *lines = text.splitlines()
    assert head == "Plan by dependency: 3 segments, 4 of 7 nodes (57%) on engines"
    assert [line.split() for line in lines[:3]] == [
        ["0", "a", "3", "nodes", "aten.add.Tensor,", "aten.div.Tensor,", "aten.mul.Tensor"],
        ["1", "pytorch", "3", "nodes", "aten.lgamma.default", "x3"],
        ["2", "a", "1", "node", "aten.cat.default"],
    ]
    assert lines[3] == "not on a:"
    assert lines[4].startswith("  aten.lgamma.default x3: no converter [lgamma")
    assert "aten.lgamma.default" in _rich(plan)


def _rich(plan: Plan) -> str:
    from rich.console import Console

    console = Console(width=160, record=True, file=io.StringIO())
    console.print(plan)
    return console.export_text()


# The work a node is worth, and what its weights take.


A, B = torch.rand(1000, 500), torch.rand(500, 1000)


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
    gm = lower(function if isinstance(function, nn.Module) else Function(function), args)
    node = next(node for node in compute_nodes(gm.graph) if f".{op}." in op_name(node))
    written = node.meta["val"].nbytes / 2**20
    assert work(node) == pytest.approx(4 + megaflops + written)


def test_views_are_nothing_and_small_ops_are_one() -> None:
    gm = lower(Function(lambda x: x.view(-1).sin()), (torch.rand(2, 2),))
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
