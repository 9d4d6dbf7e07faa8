"""Transposes and reshapes that cancel, merge, or move through layers that allow it."""

from __future__ import annotations

import numpy as np

from intarsia.network import Layer, Network, Tensor
from intarsia.network import functional as F
from intarsia.network.ops import BINARY, UNARY
from intarsia.rewrite.fusions.fusion import Fusion, given, integers, order_of
from intarsia.rewrite.pattern import PatternRewriter, Refusal, refuse, rule


@rule(
    lambda op, x: op.Transpose(
        op.Transpose(x, perm=op.any, _name="inner", _shared=True), perm=op.any, _name="outer"
    )
)
def transpose_transpose(net: Network, x: Tensor, inner: Layer, outer: Layer) -> Tensor:
    """Two transposes are one, or none."""
    first, second = order_of(inner, x.ndim), order_of(outer, x.ndim)
    order = [first[axis] for axis in second]
    return x if order == list(range(x.ndim)) else F.transpose(x, order)


def _turned_twice(rng: np.random.Generator, large: bool) -> None:
    x = given("x", *((8, 64, 128) if large else (2, 3, 4)))
    back = F.transpose(F.transpose(F.neg(x), (2, 0, 1)), (1, 2, 0))
    (F.relu(back) + F.transpose(F.transpose(x, (1, 0, 2)), (1, 0, 2))).mark_output("y")


class SunkTranspose(PatternRewriter):
    """Elementwise layers between a transpose and its inverse, which are both removed."""

    def __init__(self) -> None:
        super().__init__("transpose_sunk", {"Transpose"})

    def match_and_rewrite(self, layer: Layer) -> bool | Refusal:
        chain: list[Layer] = []
        below = layer.get_inputs(0)[0]
        while below is not None and (parent := below.get_parent()) is not None:
            if len(below.value.uses()) != 1 or below.is_output():
                return refuse(f"{below.name} is read elsewhere")
            if parent.kind == "Transpose":
                return self._cancel(layer, chain, parent)
            if not _is_elementwise(parent):
                return refuse(f"{parent.name} ({parent.kind}) is not elementwise")
            chain.append(parent)
            below = parent.get_inputs(_main_input(parent))[0]
        return refuse("there is no transpose before it")

    def _cancel(self, outer: Layer, chain: list[Layer], inner: Layer) -> bool | Refusal:
        x = inner.get_inputs(0)[0]
        assert x is not None
        if not chain:
            return refuse("there is no layer between the transposes")
        first, second = order_of(inner, x.ndim), order_of(outer, x.ndim)
        if [first[axis] for axis in second] != list(range(x.ndim)):
            return refuse(f"{second} does not undo {first}")
        for layer in reversed(chain):
            inputs = layer.get_inputs()
            inputs[_main_input(layer)] = x
            x = F.op(layer.kind, *inputs, **{name: layer.attribute(name) for name in layer.node.attributes})
        outer.get_outputs(0)[0].replace_all_uses_with(x)
        return True


def _main_input(layer: Layer) -> int:
    """The index of the input that is not a scalar."""
    first = layer.node.inputs[0]
    return 1 if layer.kind in BINARY and first is not None and first.const_value is not None else 0


def _is_elementwise(layer: Layer) -> bool:
    if layer.kind in UNARY:
        return True
    if layer.kind not in BINARY or len(layer.node.inputs) != 2:
        return False
    other = layer.get_inputs(1 - _main_input(layer))[0]
    flow = layer.get_inputs(_main_input(layer))[0]
    assert other is not None and flow is not None
    return other.constant is not None and other.constant.size == 1 and other.ndim <= flow.ndim


def _turned_around(rng: np.random.Generator, large: bool) -> None:
    x = given("x", *((8, 64, 128) if large else (2, 3, 4)))
    F.transpose(F.relu(F.transpose(x, (0, 2, 1)) * 2.0 + 0.5), (0, 2, 1)).mark_output("y")


@rule(
    lambda op, x, inner, target: op.Reshape(
        op.either(
            op.Reshape(x, inner, allowzero=op.any, _shared=True),
            op.Squeeze(x, inner, _shared=True),
            op.Unsqueeze(x, inner, _shared=True),
        ),
        op.constant(target),
        allowzero=op.any,
        _name="outer",
    )
)
def reshape_reshape(net: Network, x: Tensor, target: Tensor, outer: Layer) -> object:
    """Two reshapes are equal to the last one."""
    sizes = integers(target)
    assert sizes is not None
    if 0 in sizes:
        return refuse(f"sizes {sizes} copy from, or make, an empty dimension")
    return F.op("Reshape", x, target)


def _reshaped_twice(rng: np.random.Generator, large: bool) -> None:
    x = given("x", *((8, 64, 128) if large else (2, 3, 4)))
    a, b, c = (int(d) for d in x.shape)  # type: ignore[arg-type]
    y = F.reshape(F.reshape(F.neg(x), (a * b, c)), (a, b * c))
    (F.relu(y) + F.reshape(F.unsqueeze(x, [1]), (a, -1))).mark_output("y")


@rule(
    lambda op, x, a, b: op.either(
        op.Squeeze(op.Unsqueeze(x, op.constant(a), _shared=True), op.constant(b)),
        op.Unsqueeze(op.Squeeze(x, op.constant(a), _shared=True), op.constant(b)),
    )
)
def squeeze_unsqueeze(net: Network, x: Tensor, a: Tensor, b: Tensor) -> object:
    """A dimension of size 1 that is added and removed again, or removed and added."""
    if integers(a) != integers(b) or any(axis < 0 for axis in integers(a) or ()):
        return refuse(f"axes {integers(a)} and {integers(b)} are not the same")
    return x


def _in_and_out(rng: np.random.Generator, large: bool) -> None:
    x = given("x", *((8, 1, 128) if large else (2, 1, 4)))
    y = F.squeeze(F.unsqueeze(F.neg(x), [1]), [1])
    (F.relu(y) + F.unsqueeze(F.squeeze(F.abs(x), [1]), [1])).mark_output("y")


FUSIONS = (
    Fusion("transpose_transpose", transpose_transpose, _turned_twice, 85, free=True),
    Fusion("transpose_sunk", SunkTranspose(), _turned_around, 80, free=True),
    Fusion("reshape_reshape", reshape_reshape, _reshaped_twice, 85, free=True),
    Fusion("squeeze_unsqueeze", squeeze_unsqueeze, _in_and_out, 85, free=True),
)
