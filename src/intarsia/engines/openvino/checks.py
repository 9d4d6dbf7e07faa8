"""Guards looked at: of inputs before the engine runs, of other tensors by layers of the model itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from intarsia.engines.guards.float16 import LARGEST_HALF
from intarsia.engines.guards.kinds import (
    AnyGuard,
    Checks,
    Guards,
    Index,
    NonZero,
    Product,
    Quotient,
    ValueGuard,
)
from intarsia.engines.guards.planner import LOOKED_AT
from intarsia.errors import EngineError
from intarsia.network import Network

_HALF_SCALE = 2.0**-20  # so that a million numbers can be added up in float16


def add_checks(net: Network, model: Any, guards: Guards, *, float16: bool = False) -> Checks:
    """Let the model compute a number for each guard that is not of an input, in one more output.

    Where OpenVINO computes in `float16`, so that none is too large for it.
    """
    from openvino import opset13 as ov

    tensors = {
        name: output
        for operation in model.get_ordered_ops()
        if operation.get_type_name() != "Result"
        for output in operation.outputs()
        for name in output.get_names()
    }
    inputs = {t.name for t in net.get_inputs() if t.dtype in LOOKED_AT}
    # Sizes that the reader knows it has computed itself, with 64 bits.
    folded = guards.sizes - set(tensors)
    on_inputs: dict[str, list[ValueGuard]] = {}
    computed: list[AnyGuard] = []
    for guard in guards.all():
        if isinstance(guard, ValueGuard) and guard.tensor in inputs:
            on_inputs.setdefault(guard.tensor, []).append(
                guard
            )  # cheaper than a layer, and int64 is seen whole
        elif not folded.intersection(guard.tensors):
            computed.append(guard)
    for name, index in guards.held.items():
        if name in tensors:
            _hold(ov, tensors[name], index, tensors)
    for name in guards.divided:
        if name in tensors:
            _enlarge(ov, tensors[name].get_node())
    number_of = _number_in_float16 if float16 else _number
    numbers = [number_of(ov, guard, tensors) for guard in computed]
    if numbers:
        flat = [ov.reshape(number, ov.constant(np.array([1], np.int64)), False) for number, _ in numbers]
        model.add_results([ov.result(ov.concat(flat, 0) if len(flat) > 1 else flat[0])])
        model.validate_nodes_and_infer_types()
    return Checks(on_inputs, computed, np.array([most for _, most in numbers], dtype=np.float32))


def _number(ov: Any, guard: AnyGuard, tensors: dict[str, Any]) -> tuple[Any, float]:
    """A scalar, and the most it may be; NaN is more than anything."""
    if isinstance(guard, ValueGuard) and guard.total:
        x = tensors[guard.tensor]
        return ov.reduce_l1(_float(ov, x), _axes(ov, x), False), guard.high
    return _count(ov, _holds(ov, guard, tensors)), 0.5


def _number_in_float16(ov: Any, guard: AnyGuard, tensors: dict[str, Any]) -> tuple[Any, float]:
    """The same in float16, where a limit that is larger than all numbers would hold for infinity, too."""
    x = tensors[guard.tensors[0]]
    if not isinstance(guard, ValueGuard) or x.get_element_type().is_integral_number():
        raise EngineError(f"{guard}, and float16 does not hold such numbers exactly")
    if guard.total:
        # Whether rounding leaves small numbers is all the same: infinities and NaN stay.
        scaled = ov.multiply(_float(ov, x), _scalar(ov, _HALF_SCALE))
        return _magnitudes(ov, scaled), min(guard.high * _HALF_SCALE, LARGEST_HALF)
    low, high = (
        bound if math.isinf(bound) else min(max(bound, -LARGEST_HALF), LARGEST_HALF)
        for bound in (guard.low, guard.high)
    )
    return _count(ov, _holds(ov, ValueGuard(guard.tensor, low, high), tensors)), 0.5


def _magnitudes(ov: Any, x: Any) -> Any:
    """Their sum; of images within each channel first, as they lie in memory."""
    if len(x.get_output_partial_shape(0)) == 4:
        within = ov.reduce_l1(x, ov.constant(np.array([2, 3])), True)
        return ov.reduce_l1(within, ov.constant(np.array([0, 1])), True)
    return ov.reduce_l1(
        ov.reshape(x, ov.constant(np.array([1, -1])), False), ov.constant(np.array([1])), True
    )


def _holds(ov: Any, guard: AnyGuard, tensors: dict[str, Any]) -> Any:
    """Where a guard holds, element by element; of NaN no comparison holds."""
    if isinstance(guard, Product):
        product = ov.multiply(_float(ov, tensors[guard.one]), _float(ov, tensors[guard.other]))
        return ov.less_equal(ov.abs(product), _scalar(ov, guard.high))
    x = _float(ov, tensors[guard.tensor])
    if isinstance(guard, Quotient):
        size, divisor = ov.abs(x), ov.abs(_float(ov, tensors[guard.divisor]))
        few = ov.less(size, ov.multiply(divisor, _scalar(ov, 2.0**24)))
        plain = ov.logical_and(ov.less(_scalar(ov, 1e-30), divisor), ov.less(divisor, _scalar(ov, 1e30)))
        return ov.logical_or(ov.logical_and(few, plain), ov.less(size, divisor))
    if isinstance(guard, NonZero):
        return ov.not_equal(x, _scalar(ov, 0.0))
    if isinstance(guard, Index):
        # From -n to n - 1: twice the index and one, at most 2 n - 1 in magnitude.
        twice = ov.add(ov.multiply(x, _scalar(ov, 2.0)), _scalar(ov, 1.0))
        sizes = _float(ov, _sizes(ov, guard, tensors))
        most = ov.subtract(ov.multiply(sizes, _scalar(ov, 2.0)), _scalar(ov, 1.0))
        return ov.less_equal(ov.abs(twice), most)
    if guard.low == -math.inf:
        return ov.less_equal(x, _scalar(ov, guard.high))
    if guard.high == math.inf:
        return ov.less_equal(ov.negative(x), _scalar(ov, -guard.low))
    middle, reach = (guard.high + guard.low) / 2, (guard.high - guard.low) / 2
    shifted = ov.subtract(x, _scalar(ov, middle)) if middle else x
    return ov.less_equal(ov.abs(shifted), _scalar(ov, reach))


def _hold(ov: Any, output: Any, index: Index, tensors: dict[str, Any]) -> None:
    """Keep a layer's indices inside, since its kernel would read or write elsewhere."""
    indices = tensors[index.tensor]
    sizes = ov.convert(_sizes(ov, index, tensors), indices.get_element_type())
    one = ov.constant(np.array(1), indices.get_element_type())
    inside = ov.maximum(ov.minimum(indices, ov.subtract(sizes, one)), ov.negative(sizes))
    output.get_node().input(1).replace_source_output(inside.output(0))


def _enlarge(ov: Any, division: Any) -> None:
    """Multiply both operands of a division by 2**64 where the divisor's reciprocal would overflow.

    Both products are exact, unless the dividend's is infinite, and then so is the quotient.
    """
    dividend, divisor = division.input_value(0), division.input_value(1)
    kind = divisor.get_element_type()
    small = ov.less(ov.abs(divisor), ov.constant(np.array(2.0**-100), kind))
    factor = ov.select(small, ov.constant(np.array(2.0**64), kind), ov.constant(np.array(1.0), kind))
    division.input(0).replace_source_output(ov.multiply(dividend, factor).output(0))
    division.input(1).replace_source_output(ov.multiply(divisor, factor).output(0))


def _sizes(ov: Any, index: Index, tensors: dict[str, Any]) -> Any:
    axes = index.axes[0] if len(index.axes) == 1 else list(index.axes)
    shape = ov.shape_of(tensors[index.data])
    rank = len(tensors[index.data].get_partial_shape())
    picked = np.array(axes, dtype=np.int64) % rank
    return ov.gather(shape, ov.constant(picked), ov.constant(np.int64(0)))


def _count(ov: Any, holds: Any) -> Any:
    """How often something does not hold."""
    misses = ov.select(holds, _scalar(ov, 0.0), _scalar(ov, 1.0))
    return ov.reduce_sum(misses, _axes(ov, misses.output(0)), False)


def _axes(ov: Any, output: Any) -> Any:
    return ov.constant(np.arange(len(output.get_partial_shape()), dtype=np.int64))


def _float(ov: Any, output: Any) -> Any:
    return output if output.get_element_type().get_type_name() == "f32" else ov.convert(output, "f32")


def _scalar(ov: Any, value: float) -> Any:
    return ov.constant(np.float32(value))
