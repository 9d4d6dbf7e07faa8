"""Nodes that need no layer: indexing of tuples, sizes, arithmetic on sizes."""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from intarsia.convert.context import ConversionContext
from intarsia.errors import ConversionError
from intarsia.network import Tensor
from intarsia.network import functional as F

Evaluator = Callable[..., Any]
EVALUATORS: dict[Any, Evaluator] = {}


def evaluator(*targets: Any) -> Callable[[Evaluator], Evaluator]:
    """Register `(ctx, *args) -> value` for targets; arguments may be ints, 0-d tensors, or tuples."""

    def decorate(function: Evaluator) -> Evaluator:
        for target in targets:
            if target in EVALUATORS:
                raise ConversionError(f"{target} has an evaluator already")
            EVALUATORS[target] = function
        return function

    return decorate


def evaluate(ctx: ConversionContext, node: fx.Node, args: tuple[Any, ...]) -> Any:
    """The value of a node that makes no layer; a size torch already knows is that number."""
    value = node.meta.get("val")
    if isinstance(value, bool | int | float):
        return value
    return EVALUATORS[node.target](ctx, *args)


@evaluator(operator.getitem)
def _getitem(ctx: ConversionContext, items: Any, index: Any) -> Any:
    if isinstance(items, Tensor):
        raise ConversionError(f"indexing a tensor by {index!r} is not handled")
    return items[index]


@evaluator(torch.ops.aten.sym_size.int)
def _sym_size(ctx: ConversionContext, x: Any, dim: int) -> Any:
    size = x.shape[dim]
    return size if isinstance(size, int) else F.size(x, dim)


@evaluator(torch.ops.aten.sym_numel.default)
def _sym_numel(ctx: ConversionContext, x: Tensor) -> Any:
    return F.op("Size", x)


_PYTHON_FLOAT = ir.DataType.DOUBLE  # in float32, int(50 * 0.58) would be another size


def _number(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return F.constant(value, ir.DataType.INT64 if isinstance(value, int) else _PYTHON_FLOAT)


def _arithmetic(targets: tuple[Any, ...], layers: Callable[[Tensor, Tensor], Tensor]) -> None:
    python = targets[0]

    def function(ctx: ConversionContext, a: Any, b: Any) -> Any:
        if not isinstance(a, Tensor) and not isinstance(b, Tensor):
            return python(a, b)
        left, right = _number(a), _number(b)
        if left.dtype != right.dtype:
            left, right = F.cast(left, _PYTHON_FLOAT), F.cast(right, _PYTHON_FLOAT)
        return layers(left, right)

    evaluator(*targets)(function)


def _floor_divide(a: Tensor, b: Tensor) -> Tensor:
    # ONNX divides integers towards zero. Sizes are not negative, yet differences of sizes may be.
    quotient = F.div(a, b)
    if a.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        return F.floor(quotient)
    uneven = F.logical_not(F.equal(F.mul(quotient, b), a))
    opposed = F.logical_xor(F.less(a, 0), F.less(b, 0))
    return F.sub(quotient, F.cast(F.logical_and(uneven, opposed), a.dtype))


def _true_divide(a: Tensor, b: Tensor) -> Tensor:
    return F.div(F.cast(a, _PYTHON_FLOAT), F.cast(b, _PYTHON_FLOAT))


_arithmetic((operator.add,), F.add)
_arithmetic((operator.sub,), F.sub)
_arithmetic((operator.mul,), F.mul)
_arithmetic((operator.floordiv,), _floor_divide)
_arithmetic((operator.truediv,), _true_divide)
_arithmetic((operator.mod,), lambda a, b: F.mod(a, b))
_arithmetic((operator.pow,), F.pow)
_arithmetic((operator.eq,), F.equal)
_arithmetic((operator.ne,), lambda a, b: F.logical_not(F.equal(a, b)))
_arithmetic((operator.lt,), F.less)
_arithmetic((operator.le,), F.less_equal)
_arithmetic((operator.gt,), F.greater)
_arithmetic((operator.ge,), F.greater_equal)
_arithmetic((operator.and_,), F.logical_and)
_arithmetic((operator.or_,), F.logical_or)
_arithmetic((torch.sym_max, max), F.maximum)
_arithmetic((torch.sym_min, min), F.minimum)


def _of_one(target: Any, python: Callable[[Any], Any], layers: Callable[[Tensor], Tensor]) -> None:
    def function(ctx: ConversionContext, a: Any) -> Any:
        return layers(a) if isinstance(a, Tensor) else python(a)

    evaluator(target)(function)


def _whole(x: Tensor) -> Tensor:
    return F.cast(x, ir.DataType.INT64)


_of_one(operator.neg, operator.neg, F.neg)
_of_one(operator.abs, abs, F.abs)
_of_one(torch.sym_not, operator.not_, F.logical_not)
_of_one(torch.sym_float, float, lambda x: F.cast(x, _PYTHON_FLOAT))
_of_one(torch.sym_int, int, _whole)
_of_one(math.trunc, int, _whole)
_of_one(math.floor, math.floor, lambda x: _whole(F.floor(x)))
_of_one(math.ceil, math.ceil, lambda x: _whole(F.ceil(x)))


@evaluator(builtins.round)
def _round(ctx: ConversionContext, a: Any, digits: int | None = None) -> Any:
    if not isinstance(a, Tensor):
        return round(a, digits)
    if digits is not None:
        raise ConversionError(f"round to {digits} digits is not handled")
    return F.cast(F.round(a), ir.DataType.INT64)


@evaluator(torch.sym_sum)
def _sum(ctx: ConversionContext, items: Any) -> Any:
    total = items[0]
    for item in items[1:]:
        total = EVALUATORS[operator.add](ctx, total, item)
    return total


@evaluator(operator.rshift, operator.lshift)
def _shift(ctx: ConversionContext, a: Any, b: Any) -> Any:
    if isinstance(b, Tensor):
        raise ConversionError("a shift by a computed number is not handled")
    assert ctx.node is not None
    by_power = operator.floordiv if ctx.node.target is operator.rshift else operator.mul
    return EVALUATORS[by_power](ctx, a, 1 << b)


@evaluator(torch.sym_ite)
def _choose(ctx: ConversionContext, condition: Any, a: Any, b: Any) -> Any:
    if not isinstance(condition, Tensor):
        return a if condition else b
    return F.where(condition, _number(a), _number(b))
