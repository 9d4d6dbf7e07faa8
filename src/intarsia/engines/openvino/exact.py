"""Exact layers in the place of those that OpenVINO's kernels get wrong on every processor."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from intarsia.engines.openvino.idioms import replace

_BITS = {"i8": 8, "u8": 8, "i16": 16, "u16": 16}


def correct(model: Any) -> None:
    """Put exact layers in the place of those that are not."""
    from openvino import opset13 as ov

    for operation in model.get_ordered_ops():
        kind = operation.get_type_name()
        if kind in (
            "Greater",
            "GreaterEqual",
        ):  # OpenVINO holds them to be true of NaN, but not their opposites
            turned = ov.less if kind == "Greater" else ov.less_equal
            replace(operation.output(0), turned(operation.input_value(1), operation.input_value(0)).output(0))
        elif kind == "Mod" and operation.get_element_type().is_real():
            rest = _remainder(ov, operation.input_value(0), operation.input_value(1))
            replace(operation.output(0), rest.output(0))
        elif kind == "Convert" and operation.get_element_type().get_type_name() in ("i16", "u16"):
            # OpenVINO holds them in 32 bits.
            if (made := last_bits(ov, operation)) is not None:
                replace(operation.output(0), made.output(0))
        elif kind == "Add" and (other := _plus_zero(operation)) is not None:
            # OpenVINO leaves out a sum with 0, which makes 0 of -0.0.
            zero = ov.constant(np.array(0.0), other.get_element_type())
            replace(operation.output(0), ov.select(ov.equal(other, zero), zero, other).output(0))


def _plus_zero(total: Any) -> Any:
    """What a single 0 is added to; None in any other sum."""
    if total.get_element_type().get_type_name() not in ("f16", "f32", "f64"):
        return None
    for value, other in (total.input_values(), total.input_values()[::-1]):
        node = value.get_node()
        if node.get_type_name() == "Constant" and math.prod(value.get_shape()) == 1:
            number = float(node.get_data().item())
            if number == 0 and not math.copysign(1, number) < 0:
                return other if other.get_partial_shape() == total.get_output_partial_shape(0) else None
    return None


def _remainder(ov: Any, a: Any, b: Any) -> Any:
    """The remainder by long division; OpenVINO's own rounds the quotient.

    Every difference is exact, since what is taken away is at least half of what there is.
    """
    rest = ov.abs(a)
    half = ov.constant(np.array(0.5), a.get_element_type())
    part = ov.multiply(ov.abs(b), ov.constant(np.array(2.0**23), a.get_element_type()))
    for power in reversed(range(24)):
        rest = ov.select(ov.less_equal(part, rest), ov.subtract(rest, part), rest)
        part = ov.multiply(part, half) if power else part
    return ov.select(ov.less(a, ov.constant(np.array(0.0), a.get_element_type())), ov.negative(rest), rest)


def last_bits(ov: Any, convert: Any) -> Any:
    """The last bits of a longer integer or a float, as PyTorch converts it; None where none is cut off."""
    source, kind = convert.input_value(0), convert.get_element_type().get_type_name()
    if source.get_element_type().is_real():
        source = ov.convert(source, "i32").output(0)  # guards keep it in there
    bits, given = _BITS.get(kind), source.get_element_type()
    if bits is None or not given.is_integral_number() or given.bitwidth <= bits:
        return None
    number = functools.partial(scalar, ov, source)
    last = ov.bitwise_and(source, number(2**bits - 1))
    if kind.startswith("i"):
        last = ov.subtract(ov.bitwise_xor(last, number(2 ** (bits - 1))), number(2 ** (bits - 1)))
    return ov.convert(last, kind)


def scalar(ov: Any, like: Any, value: float) -> Any:
    """A constant of another value's type."""
    return ov.constant(np.array(value), like.get_element_type())
