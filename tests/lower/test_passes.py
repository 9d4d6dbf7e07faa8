"""Lowering: identities go, constants fold without blowing up, equal work is shared, copies stay copies."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from intarsia.capture.export import capture
from intarsia.convert import registry
from intarsia.errors import LoweringError
from intarsia.lower import Lowered, Role, lower, lowering_pass
from intarsia.lower.passes import PASSES


def lowered(model: nn.Module, *args: torch.Tensor) -> Lowered:
    return lower(capture(model, args), has_converter=registry.__contains__)


def ops(result: Lowered) -> Counter[str]:
    return Counter(str(node.target) for node in result.module.graph.nodes if node.op == "call_function")


def attributes(result: Lowered) -> dict[str, torch.Tensor]:
    nodes = [node for node in result.module.graph.nodes if node.op == "get_attr"]
    return {str(node.target): getattr(result.module, str(node.target)) for node in nodes}


def as_module(function: object) -> nn.Module:
    module = nn.Module()
    module.forward = function  # type: ignore[assignment,method-assign]
    return module


def test_identities_go() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.drop(x).detach().to(torch.float32).contiguous()
            return torch.relu(y.clone())

    assert ops(lowered(Model(), torch.randn(3))) == {"aten.relu.default": 1}


def test_constants_fold() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.weight.t() * 2 + 1)

    model = Model()
    result = lowered(model, torch.randn(2, 4))
    assert ops(result) == {"aten.matmul.default": 1}
    (folded,) = attributes(result).values()
    torch.testing.assert_close(folded, model.weight.detach().t() * 2 + 1)


def test_an_expanded_constant_is_never_stored_whole() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.row = nn.Parameter(torch.randn(1, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.row.expand(4096, 64)

    result = lowered(Model(), torch.randn(4096, 64))
    assert sum(t.untyped_storage().nbytes() for t in attributes(result).values()) <= 64 * 4


def test_random_numbers_are_never_folded() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand(3)

    result = lowered(Model(), torch.randn(3))
    assert any("rand" in name for name in ops(result))
    assert not attributes(result)


def test_equal_work_is_done_once_but_one_is_not_true() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return torch.relu(x) + 1, torch.relu(x) * 2, x + 1, x + 1.0

    result = lowered(Model(), torch.arange(3))
    assert ops(result)["aten.relu.default"] == 1
    assert ops(result)["aten.add.Tensor"] == 3


def test_random_numbers_are_not_shared() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.rand_like(x) - torch.rand_like(x)

    assert ops(lowered(Model(), torch.randn(3)))["aten.rand_like.default"] == 2


def test_dead_code_goes() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.exp(x)
            return torch.relu(x)

    assert ops(lowered(Model(), torch.randn(3))) == {"aten.relu.default": 1}


def test_tied_weights_stay_one_tensor() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids))

    model = Model()
    found = attributes(lowered(model, torch.tensor([1, 2])))
    assert {t.data_ptr() for t in found.values()} == {model.embed.weight.data_ptr()}


def test_mutation_is_described() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            x.add_(1)
            return x * self.steps

    result = lowered(Model(), torch.randn(3))
    assert [output.role for output in result.outputs].count(Role.BUFFER) == 1
    assert [output.role for output in result.outputs].count(Role.INPUT) == 1
    schemas = [n.target._schema for n in result.module.graph.nodes if n.op == "call_function"]
    assert not any(schema.is_mutable for schema in schemas)


def test_a_broken_pass_is_named() -> None:
    def cut_the_branch(module: torch.fx.GraphModule) -> None:
        node = next(n for n in module.graph.nodes if n.op == "call_function")
        with module.graph.inserting_before(node):
            late = next(iter(reversed(module.graph.nodes)))
            node.args = (late.all_input_nodes[0],)

    lowering_pass(cut_the_branch)
    try:
        with pytest.raises(LoweringError, match="cut_the_branch"):
            lowered(nn.Sequential(nn.ReLU(), nn.Tanh()), torch.randn(3))
        with pytest.raises(LoweringError, match="registered already"):
            lowering_pass(cut_the_branch)
    finally:
        PASSES.pop()
