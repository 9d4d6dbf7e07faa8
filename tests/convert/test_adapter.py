"""Schema-named arguments, raw arguments and enforced types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.convert.programs import program_of
from torch import fx

from intarsia.convert import convert, converter, enforce_tensor_types, registry
from intarsia.convert.interpreter import NodeError
from intarsia.errors import ConversionError
from intarsia.network import Network, Tensor, net_guard
from intarsia.network import functional as F

aten = torch.ops.aten
X = torch.randn(3, 4)
W = torch.randn(4, 4)


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    with registry.override():
        yield


def only(function: Any, *targets: Any) -> None:
    for target in targets:
        registry.unregister(target)
    converter(*targets)(function)


def test_an_argument_not_named_must_hold_its_default() -> None:
    def addmm(ctx: Any, self: Tensor, mat1: Tensor, mat2: Tensor) -> Tensor:
        return F.gemm(mat1, mat2, self)

    only(addmm, aten.addmm.default)
    taken = convert(program_of(lambda x: torch.addmm(x, x, W), torch.randn(4, 4)))
    assert [layer.kind for layer in taken.get_layers()] == ["Gemm"]
    with pytest.raises(NodeError, match="alpha=2 is not handled"):
        convert(program_of(lambda x: torch.addmm(x, x, W, alpha=2), torch.randn(4, 4)))


def test_a_default_spelled_out_is_a_default() -> None:
    def gelu(ctx: Any, self: Tensor) -> Tensor:
        return F.gelu(self)

    only(gelu, aten.gelu.default)
    convert(program_of(lambda x: torch.nn.functional.gelu(x, approximate="none"), X))
    with pytest.raises(NodeError, match="approximate='tanh' is not handled"):
        convert(program_of(lambda x: torch.nn.functional.gelu(x, approximate="tanh"), X))


def test_a_tensor_not_named_is_refused() -> None:
    def linear(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        return F.matmul(input, weight)

    only(linear, aten.linear.default)
    with pytest.raises(NodeError, match=r"bias=.* is not handled"):
        convert(program_of(lambda x: torch.nn.functional.linear(x, W, W[0]), X))


def test_where_memory_lies_means_nothing() -> None:
    def ones(ctx: Any, size: Any, *, dtype: Any = None) -> Tensor:
        return F.constant(np.ones(size, np.float32))

    only(ones, aten.ones.default)
    convert(program_of(lambda x: x + torch.ones(4, device="cpu", pin_memory=False), X))


def test_a_name_that_one_of_several_overloads_lacks_keeps_its_default() -> None:
    def total(ctx: Any, self: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        return F.reduce_sum(self, dim, keepdims=keepdim)

    only(total, aten.sum.default, aten.sum.dim_IntList)
    for function in (torch.sum, lambda x: torch.sum(x, [1], keepdim=True)):
        net = convert(program_of(function, X))
        assert [layer.kind for layer in net.get_layers()] == ["ReduceSum"]


def test_a_name_that_one_of_several_overloads_lacks_needs_a_default() -> None:
    with pytest.raises(ConversionError, match=r"names \['dim'\], but aten.sum.default has the arguments"):

        @converter(aten.sum.default, aten.sum.dim_IntList)
        def total(ctx: Any, self: Tensor, dim: Any) -> Tensor:
            return self


def test_a_name_the_schema_lacks_is_an_error_at_once() -> None:
    with pytest.raises(
        ConversionError, match=r"names \['slope'\], but aten.leaky_relu.default has the arguments"
    ):

        @converter(aten.leaky_relu.default)
        def leaky_relu(ctx: Any, self: Tensor, slope: float) -> Tensor:
            return self


def test_a_raw_converter_gets_what_the_reference_gives() -> None:
    got: dict[str, Any] = {}

    @converter(aten.linear.default)
    def linear(ctx: Any, target: Any, args: Any, kwargs: Any, name: str) -> Tensor:
        got.update(target=target, args=args, kwargs=kwargs, name=name, net=ctx.net)
        return F.matmul(args[0], F.transpose(F.constant(args[1]), (1, 0)))

    net = convert(program_of(lambda x: torch.nn.functional.linear(x, W), X))
    assert got["target"] is aten.linear.default
    assert got["name"] == "linear"
    assert got["net"] is net
    assert got["kwargs"] == {}
    assert isinstance(got["args"][0], Tensor)
    assert isinstance(got["args"][1], torch.Tensor), "a frozen tensor has its value"


def test_sizes_and_scalars_arrive_as_python_numbers() -> None:
    got: list[Any] = []

    def reshape(ctx: Any, self: Tensor, shape: Any) -> Tensor:
        got.extend(shape)
        return F.reshape(self, shape)

    only(reshape, aten.reshape.default)
    convert(program_of(lambda x: x.reshape(2, 6), X))
    assert got == [2, 6]


def enforced(types: Any, promote: bool, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    @enforce_tensor_types(types, promote=promote)
    def function(ctx: Any, target: Any, args: Any, kwargs: Any, name: str) -> Any:
        return args, kwargs

    with net_guard(Network()):
        made: tuple[Any, Any] = function(None, None, args, kwargs, "name")
        return made


def test_types_are_enforced_by_position_and_name() -> None:
    array, tensor = np.ones(3, np.float32), torch.ones(3)
    (first, second), named = enforced(
        {0: (Tensor,), 1: (np.ndarray,), "weight": (torch.Tensor,)}, True, array, tensor, weight=array
    )
    assert isinstance(first, Tensor)
    assert isinstance(second, np.ndarray)
    assert isinstance(named["weight"], torch.Tensor)


def test_the_first_type_that_can_hold_a_value_is_taken() -> None:
    with net_guard(Network()):
        x = Tensor("x", torch.float32, (3,))
        args, _ = enforced({0: (np.ndarray, Tensor)}, True, x)
        assert args[0] is x, "a tensor of the network has no value, so it stays one"
        with pytest.raises(ConversionError, match="argument 0 is a Tensor; it must be ndarray"):
            enforced({0: (np.ndarray,)}, True, x)


def test_without_promotion_another_type_is_refused() -> None:
    args, _ = enforced({0: (np.ndarray, torch.Tensor)}, False, torch.ones(3))
    assert isinstance(args[0], torch.Tensor)
    with pytest.raises(ConversionError, match="argument 'weight' is a ndarray; it must be Tensor"):
        enforced({"weight": (Tensor,)}, False, weight=np.ones(3))


def test_absent_and_none_are_left_alone() -> None:
    args, named = enforced({0: (Tensor,), 3: (Tensor,), "bias": (Tensor,)}, True, None)
    assert args == (None,)
    assert named == {}


@pytest.mark.parametrize("types", [{0: ()}, {0: (int,)}, {"x": (Tensor, str)}])
def test_only_tensor_types_can_be_enforced(types: Any) -> None:
    with pytest.raises(ConversionError, match="must be annotated with Tensor"):
        enforce_tensor_types(types)


def test_enforcement_reaches_the_network() -> None:
    @converter(aten.linear.default)
    @enforce_tensor_types({0: (Tensor,), 1: (np.ndarray, Tensor)})
    def linear(ctx: Any, target: Any, args: Any, kwargs: Any, name: str) -> Tensor:
        assert isinstance(args[1], np.ndarray)
        return F.matmul(args[0], F.constant(np.ascontiguousarray(args[1].T)))

    net = convert(program_of(lambda x: torch.nn.functional.linear(x, W), X))
    assert [layer.kind for layer in net.get_layers()] == ["MatMul"]


def one_node(value: Any) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = X
    y = graph.call_function(aten.relu.default, (x,))
    y.meta["val"] = value
    graph.output(y)
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda x: F.cast(x, torch.int64), "returned INT64 where torch returns FLOAT"),
        (lambda x: F.unsqueeze(x, [0]), "returned 3 dimensions where torch returns 2"),
        (lambda x: F.transpose(x, (1, 0)), r"returned shape \(4, 3\) where torch returns \(3, 4\)"),
        (lambda x: 3, "returned a int, not a tensor"),
        (lambda x: (x, x), "returned a tuple, not a tensor"),
    ],
)
def test_a_result_that_is_not_torchs_is_refused(made: Any, reason: str) -> None:
    def relu(ctx: Any, self: Tensor) -> Any:
        return made(self)

    only(relu, aten.relu.default)
    with pytest.raises(NodeError, match=reason):
        convert(one_node(X))


def test_a_result_count_that_is_not_torchs_is_refused() -> None:
    def relu(ctx: Any, self: Tensor) -> Any:
        return (self,)

    only(relu, aten.relu.default)
    with pytest.raises(NodeError, match="returned 1 results where torch returns 2"):
        convert(one_node((X, X)))


def test_results_get_torchs_symbols() -> None:
    batch = torch.export.Dim("batch", min=2)
    net = convert(program_of(lambda x: torch.relu(x).reshape(-1, 2), X, dynamic=({0: batch},)))
    (output,) = net.get_outputs()
    (given,) = net.get_inputs()
    assert isinstance(given.shape[0], str)
    assert output.shape == (f"2*{given.shape[0]}", 2)


def test_frozen_tensors_are_constants() -> None:
    net = convert(program_of(lambda x: x @ W, X))
    assert [given.name for given in net.get_inputs()] == ["args_0"]
    (layer,) = net.get_layers()
    weight = layer.get_inputs(1)[0]
    assert weight is not None and weight.constant is not None
    np.testing.assert_array_equal(weight.constant, W.numpy())


def test_what_is_returned_twice_or_untouched_is_copied() -> None:
    def function(x: torch.Tensor) -> Any:
        y = torch.relu(x)
        return x, y, y, W

    net = convert(program_of(function, X))
    names = [output.name for output in net.get_outputs()]
    assert len(names) == len(set(names))
