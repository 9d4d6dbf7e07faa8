"""cond, while_loop and scan stand alone in the plan: one layer of an engine, or bodies on engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import intarsia
from intarsia.convert import ConverterPriority, converter, registry
from intarsia.network import functional as F

ENGINES = ["onnxruntime", "openvino"]


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return torch.cond(
            x.sum() > 0, lambda a: torch.relu(self.linear(a)) + 1, lambda a: torch.tanh(a) * 2, (x,)
        )


class Loop(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def more(i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return i < 3

        def step(i: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return i + 1, torch.sin(y) * 1.5

        return torch.while_loop(more, step, (torch.tensor(0), x + 1))[1]


@pytest.mark.parametrize("engine", ENGINES)
def test_both_branches(engine: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Branch().eval()
    fast = intarsia.compile(model, (torch.randn(2, 4),), engines=[engine], min_block_size=1)
    taken = set()
    for _ in range(12):
        x = torch.randn(2, 4)
        taken.add(bool(model.linear(x).sum() > 0))
        torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-5, atol=1e-5)
    assert taken == {True, False}
    bodies = {"cond.true_graph_0", "cond.false_graph_0"}
    assert set(fast.body_plans) == (bodies if engine == "openvino" else set())
    assert all(plan.engines == (engine,) for plan in fast.body_plans.values())
    (alone,) = [segment for segment in fast.plan.segments if segment.do_not_merge]
    assert [str(node.target) for node in alone.nodes] == ["cond"]
    assert alone.engine == ("pytorch" if engine == "openvino" else engine)
    with torch.no_grad():
        model.linear.weight.mul_(-1)
    fast.refit(model)
    intarsia.save(fast, tmp_path / "branch.intarsia")
    again = intarsia.load(tmp_path / "branch.intarsia")
    for sign in (1, -1):
        torch.testing.assert_close(fast(x * sign), model(x * sign).detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(again(x * sign), model(x * sign).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_loop(engine: str) -> None:
    model = Loop()
    fast = intarsia.compile(model, (torch.randn(2, 4),), engines=[engine], min_block_size=1)
    x = torch.randn(2, 4)
    torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)
    assert fast.plan.on_engines >= 0.75, "all that is computed is computed in the bodies"
    assert not [note for note in fast.notes if "not verified" in note]
    if engine == "onnxruntime":
        assert fast.body_plans == {} and fast.plan.segments[-1].engine == engine
        return
    assert len(fast.body_plans) == 2
    assert f"in while_loop.while_loop_body_graph_0: 3 nodes on {engine}" in str(fast.plan)
    assert all(plan.engines == (engine,) for plan in fast.body_plans.values())


class Cells(nn.Module):
    """An RNN cell in a loop over time, whose sizes vary; the loop may have no turn."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(40, 40)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        def more(i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return i < turns

        def step(i: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return i + 1, torch.tanh(self.cell(y))

        return torch.while_loop(more, step, (torch.zeros((), dtype=torch.int64), x.sin()))[1]


def test_a_loop_of_sizes_and_turns_that_vary() -> None:
    model, x = Cells().eval(), torch.randn(2, 40)
    rows = torch.export.Dim("rows", min=1, max=16)
    fast = intarsia.compile(
        model, (x, torch.tensor(3)), dynamic_shapes=({0: rows}, None), engines=["onnxruntime"]
    )
    assert [s.engine for s in fast.plan.segments if s.do_not_merge] == ["onnxruntime"]
    for count, turns in ((1, 0), (2, 1), (5, 7)):
        call = torch.randn(count, 40), torch.tensor(turns)
        torch.testing.assert_close(fast(*call), model(*call).detach(), rtol=1e-5, atol=1e-5)


def test_a_loop_that_the_example_does_not_run_is_told() -> None:
    fast = intarsia.compile(
        Cells().eval(), (torch.randn(2, 40), torch.tensor(0)), engines=["onnxruntime"], min_block_size=1
    )
    (note,) = [note for note in fast.notes if "not verified" in note]
    assert "while_loop_body_graph_0 is not verified: the example does not run it" in note


class Running(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from torch._higher_order_ops.scan import scan

        def step(carry: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            carry = torch.tanh(carry + y)
            return carry, carry * 2.0

        return scan(step, torch.zeros(4), x * 2)


@pytest.mark.parametrize("engine", ENGINES)
def test_scan(engine: str) -> None:
    # torch has no public name for scan yet; a version without this one has another, or none.
    pytest.importorskip("torch._higher_order_ops.scan", reason="this torch has no scan here")
    fast = intarsia.compile(Running(), (torch.randn(5, 4),), engines=[engine], min_block_size=1)
    x = torch.randn(5, 4)
    torch.testing.assert_close(fast(x), Running()(x), rtol=1e-5, atol=1e-5)
    assert [plan.engines for plan in fast.body_plans.values()] == [(engine,)]


class Waves(nn.Module):
    """Of two branches the example takes one; each has a branch of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inner(a: torch.Tensor) -> torch.Tensor:
            return torch.cond(a.sum() > 100, lambda b: torch.sin(b) + 1, lambda b: b * 3, (a,))

        return torch.cond(x.sum() > 0, lambda a: torch.relu(a * 2 + 1) * a, lambda a: inner(a) * 2 + 1, (x,))


@converter(torch.ops.aten.sin.default, priority=ConverterPriority.HIGH, register=False)
def _cosine(ctx: Any, self: Any) -> Any:
    return F.cos(self)


def test_branches_that_no_example_takes_are_verified() -> None:
    x = torch.rand(2, 4) + 0.1
    with registry.override(_cosine):
        fast = intarsia.compile(Waves(), (x,), engines=["onnxruntime"], min_block_size=1)
    for sign in (1, -1, -1000):
        torch.testing.assert_close(fast(x * sign), Waves()(x * sign))
    (plan,) = [plan for name, plan in fast.body_plans.items() if name.endswith("/cond.true_graph_0")]
    assert "answers wrongly" in str(plan)


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda a: a * 2 + 1, lambda a: torch.sin(a) + 1, (x,))


def test_the_other_branch_of_a_layer_is_verified() -> None:
    x = torch.rand(2, 4) + 0.1
    with registry.override(_cosine):
        fast = intarsia.compile(Doubled(), (x,), engines=["onnxruntime"], min_block_size=1)
    for sign in (1, -1):
        torch.testing.assert_close(fast(x * sign), Doubled()(x * sign))
    assert "answers wrongly" in str(fast.plan)


class Windows(nn.Module):
    """A branch that ONNX Runtime computes as PyTorch does only where values are guarded."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def pooled(a: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.max_pool2d(a, 3, 1, 1) + 1

        return torch.cond(x[0, 0, 0, 0] > 0, pooled, lambda a: a * 2, (x,))


def test_a_body_that_needs_guards_is_compiled_for_itself() -> None:
    x = torch.rand(1, 2, 8, 8) + 0.1
    fast = intarsia.compile(Windows(), (x,), engines=["onnxruntime"], min_block_size=1)
    assert "its body needs guards on values" in str(fast.plan) and len(fast.body_plans) == 2
    hidden = x.clone()
    hidden[0, 0, 4:, 4:] = float("nan")
    for call in (x, -x, hidden):
        torch.testing.assert_close(fast(call), Windows()(call), equal_nan=True)


@pytest.mark.parametrize(
    "options", [{"torch_executed_ops": ["aten::sin"]}, {"memory_budget": {"onnxruntime": 10}}]
)
def test_options_hold_in_bodies(options: dict[str, Any]) -> None:
    x = torch.rand(2, 4)
    options = {"engines": ["onnxruntime"], "min_block_size": 1, **options}
    fast = intarsia.compile(Doubled(), (x,), **options)
    assert set(fast.body_plans) == {"cond.true_graph_0", "cond.false_graph_0"}
    assert set(intarsia.explain(Doubled(), (x,), **options).bodies) == set(fast.body_plans)
    assert not intarsia.explain(Doubled(), (x,), engines=["onnxruntime"], min_block_size=1).bodies


class Roots(nn.Module):
    """The branch that the example leaves out cannot run on its operands."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def checked(a: torch.Tensor) -> torch.Tensor:
            torch._assert_async((a < 0).all(), "negative numbers only")
            return a * 2

        return torch.cond(x.sum() > 0, lambda a: torch.sqrt(a) + 1, checked, (x,))


def test_a_branch_that_cannot_be_tried_is_told() -> None:
    x = torch.rand(2, 4) + 0.1
    fast = intarsia.compile(Roots(), (x,), engines=["onnxruntime"], min_block_size=1)
    (note,) = [note for note in fast.notes if "not verified" in note]
    assert "not verified" in note and "negative numbers only" in note
    torch.testing.assert_close(fast(-x), Roots()(-x))


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(
            x.sum() > 0, lambda a: self.second(self.first(a).relu()).relu(), lambda a: a * 2, (x,)
        )


def test_a_memory_budget_holds_in_bodies() -> None:
    model, x = TwoLayers().eval(), torch.rand(2, 64)
    budget = {"onnxruntime": 20_000}
    fast = intarsia.compile(model, (x,), engines=["onnxruntime"], min_block_size=1, memory_budget=budget)
    assert [len(s.nodes) for s in fast.body_plans["cond.true_graph_0"].segments] == [2, 2]
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-5, atol=1e-6)
