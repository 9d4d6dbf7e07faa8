"""A write to fresh memory, or an operator alone, does not cost a second trace; what is less clear does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram

import intarsia
from intarsia.capture.export import capture
from intarsia.convert import registry
from intarsia.lower import Lowered, lower, lowering

X = torch.linspace(-2, 2, 24).reshape(4, 6)
Function = Callable[[nn.Module, torch.Tensor], object]


class Net(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)
        self.drop = nn.Dropout()
        self.function = function

    def forward(self, x: torch.Tensor) -> object:
        return self.function(self, x)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every time a program is traced anew."""
    found: list[int] = []
    original = lowering.decomposed

    def counted(program: ExportedProgram, table: dict[Any, Any]) -> ExportedProgram:
        found.append(1)
        return original(program, table)

    monkeypatch.setattr(lowering, "decomposed", counted)
    return found


def _lowered(function: Function) -> tuple[Lowered, nn.Module]:
    model = Net(function).eval()
    return lower(capture(model, (X,)), registry.__contains__), model


def _check(function: Function) -> Lowered:
    lowered, model = _lowered(function)
    given = X.clone()
    with torch.no_grad():
        expected = model(given)
        answers = lowered.module(X.clone())
    wanted = list(expected if isinstance(expected, tuple) else (expected,))
    for answer, truth in zip(answers[-len(wanted) :], wanted, strict=True):
        torch.testing.assert_close(answer, truth)
    assert not any(
        getattr(n.target, "_schema", None) and n.target._schema.is_mutable for n in lowered.module.graph.nodes
    )
    return lowered


def _residual(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    hidden = net.linear(x)
    hidden += x
    return hidden * 2


def _read_before_and_after(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    hidden = net.linear(x)
    before = torch.tanh(hidden)
    hidden *= 3.0
    return before + torch.sigmoid(hidden)


def _written_twice(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    hidden = net.linear(x)
    hidden += x
    hidden.sub_(x, alpha=0.5)
    return torch.relu(hidden)


def _diff(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.diff(net.linear(x), dim=1) * 2


def _constant(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return net.linear(x) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])  # `detach_` of what it lifts


@pytest.mark.parametrize("function", [_residual, _read_before_and_after, _written_twice, _diff, _constant])
def test_no_second_trace(function: Function, traces: list[int]) -> None:
    _check(function)
    assert not traces


def test_a_size_that_is_read_costs_no_second_trace(traces: list[int]) -> None:
    model = Net(lambda net, x: net.linear(x).reshape(x.shape[0] * 2, 3) * x.shape[0]).eval()
    rows = torch.export.Dim("rows", min=1, max=64)
    lowered = lower(capture(model, (X,), dynamic_shapes={"x": {0: rows}}), registry.__contains__)
    assert not traces
    for count in (4, 7):
        given = torch.randn(count, 6)
        torch.testing.assert_close(lowered.module(given)[-1], model(given))


def _view_sees_the_write(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    hidden = net.linear(x)
    row = hidden[0]
    hidden += 1.0
    return row * 2


def _write_through_a_view(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    hidden = net.linear(x)
    hidden[1] += 1.0
    return hidden * 2


def _dropout_hands_out_its_input(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(net.linear(x))
    same = net.drop(hidden)
    same += 1.0
    return hidden * 2


def _of_the_caller(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x += 1.0
    return net.linear(x)


def _returned(net: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = net.linear(x)
    hidden += 1.0
    return hidden, hidden * 2


def _whole_numbers(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    count = (x > 0).long() + (x > 1).long()
    count *= 2
    return net.linear(x) * count


@pytest.mark.parametrize(
    "function",
    [
        _view_sees_the_write,
        _write_through_a_view,
        _of_the_caller,
        _returned,
        _whole_numbers,
    ],
)
def test_what_is_less_clear_answers_as_eager(function: Function) -> None:
    _check(function)


def test_memory_that_export_takes_for_another_s_is_found_by_the_model_s_answer() -> None:
    """Export itself loses that dropout hands out its input: the model then runs as it is, and says so."""
    model = Net(_dropout_hands_out_its_input).eval()
    fast = intarsia.compile(model, (X,), engines=["onnxruntime"])
    torch.testing.assert_close(fast(X), model(X))


def test_the_long_way_is_taken_where_memory_is_shared(traces: list[int]) -> None:
    _check(_view_sees_the_write)
    assert traces


def test_operators_answer_to_the_names_they_were_written_by() -> None:
    fast = intarsia.compile(
        Net(_diff).eval(), (X,), engines=["onnxruntime"], min_block_size=1, torch_executed_ops=["aten::diff"]
    )
    assert "pytorch" in fast.plan.engines


def test_an_operator_without_operands_beside_one_that_needs_a_second_trace(traces: list[int]) -> None:
    def function(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        copy = x + 1
        copy[0].add_(1)
        return copy @ torch.eye(6) + torch.ones(6).cumsum(0)

    _check(function)
    assert traces == [1]


@pytest.mark.parametrize(
    "same",
    [
        lambda x: nn.functional.dropout(x, 0.5, training=False),
        lambda x: nn.functional.dropout(x, 0.0, training=True),
        lambda x: x.type_as(x),
        lambda x: x.contiguous(),
    ],
    ids=["evaluation", "probability 0", "type_as", "contiguous"],
)
def test_a_write_to_what_is_the_input_itself_changes_the_input(
    same: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """`nn.Dropout` in evaluation returns its input, which its schema does not say. The write was lost."""

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = same(x)
            y.add_(1)
            return y * 2

    fast = intarsia.compile(Model().eval(), (torch.zeros(2, 3),), min_block_size=1)
    ours, theirs = torch.zeros(2, 3), torch.zeros(2, 3)
    torch.testing.assert_close(fast(ours), Model().eval()(theirs))
    torch.testing.assert_close(ours, theirs)
