"""Sizes and arithmetic on sizes: one conversion, three shapes, the same numbers as Python's."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
from tests.convert import drivers
from tests.convert.programs import program_of
from torch import fx
from torch.export import Dim

from intarsia.convert import convert, evaluator, registry
from intarsia.convert.evaluators import EVALUATORS
from intarsia.convert.interpreter import NodeError
from intarsia.errors import ConversionError, EngineError

N = Dim("n", min=20, max=200)
SIZES = {
    "sum": lambda n: n + 3,
    "difference": lambda n: n - 7,
    "product": lambda n: n * 2,
    "floor": lambda n: n // 3,
    "floor of negatives": lambda n: -(-n // 4),
    "remainder": lambda n: n % 7 + 2,
    "power": lambda n: n**2,
    "absolute": lambda n: abs(n - 300),
    "largest": lambda n: torch.sym_max(n, 60),
    "smallest": lambda n: torch.sym_min(n, 60),
    "shift": lambda n: n >> 1,
    "sym_sum": lambda n: torch.sym_sum([n, 4, n]),
    "math.floor": lambda n: math.floor(n * 0.58),
    "math.ceil": lambda n: math.ceil(n / 3),
    "round": lambda n: round(n / 4),
    "choice": lambda n: torch.sym_ite(n > 60, n, n + n),
}
FLOATS = {"math.floor", "math.ceil", "round"}  # float32 makes int(50 * 0.58) another size


@pytest.mark.parametrize("engine", drivers.ENGINES)
@pytest.mark.parametrize("name", SIZES)
def test_sizes_follow_the_input(name: str, engine: str) -> None:
    size = SIZES[name]

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.full((size(x.shape[0]),), 2.0) + x[0]

    module = program_of(function, torch.randn(40), dynamic=({0: N},))
    net = convert(module)
    if engine == "openvino" and name in FLOATS:
        with pytest.raises(EngineError, match="is float64, which OpenVINO computes in float32"):
            drivers.build(engine, net)
        return
    program = drivers.build(engine, net)
    for n in (33, 50, 125):
        x = torch.randn(n)
        torch.testing.assert_close(program(x)[0], function(x))


def test_sizes_as_factors() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * (x.shape[0] ** 0.5) / x.shape[0] + x.numel()

    program = drivers.build(
        "onnxruntime", convert(program_of(function, torch.randn(40, 3), dynamic=({0: N},)))
    )
    for n in (33, 50, 125):
        x = torch.randn(n, 3)
        torch.testing.assert_close(program(x)[0], function(x))


def test_a_tuple_is_indexed_without_a_layer() -> None:
    net = convert(program_of(lambda x: torch.split(x, 2)[1], torch.randn(4)))
    assert [layer.kind for layer in net.get_layers()] in (["Split"], ["Slice"])


def one_node(target: Any, *args: Any) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.randn(3)
    y = graph.call_function(target, tuple(x if a is None else a for a in args))
    graph.output(y)
    return fx.GraphModule({}, graph)


def test_indexing_a_tensor_is_refused() -> None:
    with pytest.raises(NodeError, match="indexing a tensor by 0 is not handled"):
        convert(one_node(operator.getitem, None, 0))


def test_an_evaluator_is_registered_once() -> None:
    def triple(value: Any) -> Any:
        return value

    @evaluator(triple)
    def evaluate_triple(ctx: Any, value: Any) -> Any:
        return 3 * value

    try:
        with pytest.raises(ConversionError, match="has an evaluator already"):
            evaluator(triple)(evaluate_triple)
        net = convert(one_node(triple, 5))
        assert net.get_outputs()[0].get_parent().kind == "Identity"  # type: ignore[union-attr]
        with pytest.raises(NodeError, match="its evaluator failed: TypeError"):
            convert(one_node(triple, None, None))
    finally:
        del EVALUATORS[triple]


def random_operators() -> list[torch._ops.OpOverload]:
    found = []
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            overloads = [getattr(packet, o) for o in packet.overloads()]
            found += [o for o in overloads if torch.Tag.nondeterministic_seeded in o.tags]
    return found


# They draw when training only; a converter takes them in inference, where they compute nothing random.
TRAINING_ONLY = {"dropout", "scaled_dot_product", "rrelu", "lstm", "gru", "rnn"}


def test_random_operators_have_no_converter() -> None:
    found = random_operators()
    assert len(found) > 30, "torch has stopped tagging its random operators"
    for overload in found:
        if overload in registry or overload in EVALUATORS:
            name = str(overload).split(".")[1].lstrip("_")
            assert any(part in name for part in TRAINING_ONLY), f"{overload} is random"


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.nn.functional.dropout(x, 0.5, training=True),
        lambda x: torch.ops.aten.native_dropout(x, 0.5, True)[0],
        lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        lambda x: x + torch.rand(3, 4, 4),
        lambda x: x + torch.randn_like(x),
        lambda x: torch.bernoulli(x.sigmoid()),
        lambda x: torch.nn.functional.rrelu(x, training=True),
    ],
)
def test_nothing_random_is_converted(function: Any) -> None:
    with pytest.raises(NodeError):
        convert(program_of(function, torch.randn(3, 4, 4)))
