"""Replacements of layers that OpenVINO's kernels for ARM compute wrongly, or add up in float16."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from intarsia.engines.openvino.corrections import last_bits, scalar
from intarsia.engines.openvino.idioms import rename, replace
from intarsia.errors import EngineError

# Long sums in parts, where OpenVINO adds up in float16, as its kernels for ARM do.
#
# On a Neoverse N1 ViT-B was off by 0.030 and ResNet-50 by 0.030 in float16. With products of more than 576
# terms summed in parts they are off by 0.015 and 0.005, and still 1.7 and 1.5 times as fast as exact.


_MOST_TERMS = 576  # of one sum
_MOST_TRANSFORMED = 1152  # where a kernel may transform windows first, and adds up channels alone


def add_up_in_parts(model: Any) -> None:
    """Make products by constant weights, of many terms, sums of shorter products.

    Errors of a sum grow with the root of its terms, and those of a few sums that are added in pairs hardly:
    for sums of 3072 terms they become a third. The shorter products take no longer than the one, the sums
    little.
    """
    for operation in model.get_ordered_ops():
        if operation.get_type_name() in ("Convolution", "MatMul"):
            _split(operation)
    model.validate_nodes_and_infer_types()


def _split(product: Any) -> None:
    from openvino import opset13 as ov

    source = product.get_attributes()
    x, weight = product.input_value(0), _constant(product.input_value(1))
    if weight is None:
        return
    if product.get_type_name() == "MatMul":
        if weight.ndim != 2 or source["transpose_a"]:
            return
        weight = weight if source["transpose_b"] else weight.T
        axis, most = len(x.get_partial_shape()) - 1, _MOST_TERMS
        rest: list[Any] = [False, True]
        layer = ov.matmul
    else:
        steps = [*source["strides"], *source["dilations"]]
        transformed = weight[0, 0].size > 1 and all(step == 1 for step in steps)
        axis, most = 1, _MOST_TRANSFORMED if transformed else _MOST_TERMS
        rest = [source[name] for name in ("strides", "pads_begin", "pads_end", "dilations", "auto_pad")]
        layer = ov.convolution
    count = min(-(-weight[0].size // most), weight.shape[1])
    if count == 1:
        return
    weights = np.array_split(weight, count, axis=1)  # as equal as can be
    lengths = ov.constant(np.array([part.shape[1] for part in weights], np.int64))
    parts = ov.variadic_split(x, ov.constant(np.int64(axis)), lengths).outputs()
    terms = [
        layer(part, ov.constant(np.ascontiguousarray(own)), *rest)
        for part, own in zip(parts, weights, strict=True)
    ]
    while len(terms) > 1:  # in pairs
        terms = [
            ov.add(*terms[at : at + 2]) if at + 1 < len(terms) else terms[at]
            for at in range(0, len(terms), 2)
        ]
    replace(product.output(0), terms[0].output(0))


def _constant(value: Any) -> np.ndarray[Any, Any] | None:
    """The numbers of a weight, turned if they are; None of what is computed."""
    node = value.get_node()
    if node.get_type_name() == "Constant":
        data: np.ndarray[Any, Any] = node.get_data()
        return data
    if node.get_type_name() != "Transpose":
        return None
    turned, order = (_constant(one) for one in node.input_values())
    return None if turned is None or order is None else turned.transpose(order)


# Exact layers in the place of those that OpenVINO's kernels for ARM processors get wrong.
#
# They compute integers in float32, which rounds and saturates; the logarithm is a polynomial that knows
# neither 0 nor infinities nor NaN; and a layer that converts becomes part of one that adds its result to
# another's, or the like, whose first operand is then read as what was to be converted (2026.4). OpenVINO
# for x86 needs none of this.


_TINY = 2.0**-126  # the least number that the logarithm's kernel takes for what it is
_TERMS = tuple(range(1, 17, 2))  # of a series in at most 1/3, to the last bit of float32
# They leave no fraction, and what is converted of constants is computed elsewhere.
_WHOLE = frozenset({"Ceiling", "Constant", "FakeQuantize", "Floor", "Round"})
_SCALES = frozenset({"Divide", "Multiply", "Reshape", "Transpose"})
_TRANSPOSED = ("ConvolutionBackpropData", "GroupConvolutionBackpropData")
_OF_TWO = frozenset(
    {"Add", "Divide", "Equal", "FloorMod", "Greater", "GreaterEqual", "Less", "LessEqual", "LogicalAnd"}
    | {"LogicalOr", "LogicalXor", "Maximum", "Minimum", "Mod", "Multiply", "NotEqual", "PRelu", "Power"}
    | {"SquaredDifference", "Subtract", "BitwiseAnd", "BitwiseOr", "BitwiseXor"}
)


def mend(model: Any) -> None:
    """Replace inexact layers with exact ones, on ARM."""
    from openvino import opset13 as ov

    for operation in model.get_ordered_ops():
        if operation.get_type_name() == "TopK":
            _order_floats(ov, operation)
        elif (result := _exact(ov, operation)) is not None:
            replace(operation.output(0), result.output(0))
    for operation in model.get_ordered_ops():
        if operation.get_type_name() == "Convert":
            _keep_apart(ov, operation)
    model.validate_nodes_and_infer_types()


def _exact(ov: Any, operation: Any) -> Any:
    """The replacement of an operation; None if the operation is exact."""
    kind = operation.get_type_name()
    if kind == "Log":
        return _log(ov, operation.input_value(0))
    if kind == "SoftPlus":
        return _softplus(ov, operation.input_value(0))
    if kind == "LessEqual":  # being the opposite of "more", it is true of NaN
        a, b = operation.input_values()
        return ov.logical_or(ov.less(a, b), ov.equal(a, b))
    if kind == "Softmax":
        return _softmax(ov, operation)
    if kind in _TRANSPOSED and len(operation.get_output_partial_shape(0)) == 3:
        return _as_plane(ov, operation)
    if kind == "Divide" and operation.get_element_type().is_integral_number():
        return _quotient(ov, operation)
    if kind == "Convert" and operation.get_element_type().is_integral_number():
        return _integer(ov, operation)
    return None


def _log(ov: Any, x: Any) -> Any:
    """The logarithm; OpenVINO's own is off by 5e-6, and returns a number even for negative inputs."""
    number = functools.partial(scalar, ov, x)
    small = ov.less(x, number(_TINY))
    scaled = ov.select(small, ov.multiply(x, number(2.0**24)), x)
    rough = ov.log(scaled)
    root = ov.exp(ov.multiply(rough, number(-0.5)))  # twice, since exp(-rough) may be too small for float32
    better = ov.add(rough, ov.subtract(ov.multiply(ov.multiply(scaled, root), root), number(1.0)))
    far = ov.subtract(better, ov.select(small, number(24 * math.log(2)), number(0.0)))
    near = _twice_atanh(ov, ov.divide(ov.subtract(x, number(1.0)), ov.add(x, number(1.0))), number)
    finite = ov.select(ov.less(ov.abs(ov.subtract(x, number(1.25))), number(0.75)), near, far)
    positive = ov.select(ov.less(x, number(math.inf)), finite, x)
    beside = ov.select(ov.equal(x, number(0.0)), number(-math.inf), number(math.nan))
    return ov.select(ov.less(number(0.0), x), positive, beside)


def _softplus(ov: Any, x: Any) -> Any:
    """log(1 + exp(x)); OpenVINO's own is off by 6e-4, and is 4e-4 where it should be 0."""
    number = functools.partial(scalar, ov, x)
    power = ov.exp(ov.negative(ov.abs(x)))
    rest = _twice_atanh(ov, ov.divide(power, ov.add(power, number(2.0))), number)  # log(1 + power)
    return ov.select(ov.less(x, number(0.0)), rest, ov.add(x, rest))


def _softmax(ov: Any, softmax: Any) -> Any:
    """NaN in rows of minus infinity, where OpenVINO puts numbers; None after a product, of no masks."""
    x = softmax.input_value(0)
    source = x.get_node()
    while source.get_type_name() in _SCALES:
        source = source.input_value(0).get_node()
    if source.get_type_name() == "MatMul":
        return None
    number = functools.partial(scalar, ov, x)
    axis = softmax.get_attributes()["axis"]
    largest = ov.reduce_max(x, ov.constant(np.array([axis])), True)
    wrong = ov.select(ov.equal(largest, number(-math.inf)), number(math.nan), number(0.0))
    return ov.add(ov.softmax(x, axis), wrong)


def _order_floats(ov: Any, top: Any) -> None:
    """Put integers in order as float32, which guards keep exact; OpenVINO's own ignores their sign."""
    values, kind = top.output(0), top.output(0).get_element_type()
    if not kind.is_integral_number():
        return
    readers = values.get_target_inputs()
    top.input(0).replace_source_output(ov.convert(top.input_value(0), "f32").output(0))
    top.validate_and_infer_types()
    integers = ov.convert(values, kind.get_type_name()).output(0)
    rename(values, integers)
    for reader in readers:
        reader.replace_source_output(integers)


def _twice_atanh(ov: Any, z: Any, number: Callable[[float], Any]) -> Any:
    """log((1 + z) / (1 - z)) of z up to 1/3."""
    square = ov.multiply(z, z)
    total = number(2 / _TERMS[-1])
    for term in reversed(_TERMS[:-1]):
        total = ov.add(ov.multiply(total, square), number(2 / term))
    return ov.multiply(z, total)


def _quotient(ov: Any, division: Any) -> Any:
    """The quotient of integers towards 0; OpenVINO's own goes down. Guards keep it exact in float32."""
    a, b = (_apart(ov, ov.convert(value, "f32")) for value in division.input_values())
    quotient = _towards_zero(ov, ov.divide(a, b))
    return ov.convert(quotient, division.get_element_type().get_type_name())


def _as_plane(ov: Any, convolution: Any) -> Any:
    """A transposed convolution of one dimension as one of two; OpenVINO's own is wrong."""
    data, kernel, *text = convolution.input_values()
    if text:
        raise EngineError("a transposed convolution of one dimension with output_shape is not handled")
    kind = convolution.get_type_name()
    result = (
        ov.convolution_backprop_data
        if kind == "ConvolutionBackpropData"
        else ov.group_convolution_backprop_data
    )
    source = convolution.get_attributes()
    before = ov.constant(np.array([-2]))
    plane = result(
        ov.unsqueeze(data, before),
        ov.unsqueeze(kernel, before),
        [1, *source["strides"]],
        pads_begin=[0, *source["pads_begin"]],
        pads_end=[0, *source["pads_end"]],
        dilations=[1, *source["dilations"]],
        auto_pad=source["auto_pad"],
        output_padding=[0, *source["output_padding"]],
    )
    return ov.squeeze(plane, before)


def _towards_zero(ov: Any, x: Any) -> Any:
    output = x.output(0) if hasattr(x, "output") else x
    return ov.select(ov.less(x, scalar(ov, output, 0.0)), ov.ceiling(x), ov.floor(x))


def _integer(ov: Any, convert: Any) -> Any:
    """An integer of what may be computed in float32: without fraction, and its last bits of a longer one."""
    source, kind = convert.input_value(0), convert.get_element_type().get_type_name()
    if source.get_node().get_type_name() in _WHOLE:
        return None
    if source.get_element_type().is_real():
        return ov.convert(_towards_zero(ov, source), kind)  # `correct` has seen to those of 16 bits
    return last_bits(ov, convert)


def _keep_apart(ov: Any, convert: Any) -> None:
    """Put a layer between one that converts and those that read it second, lest it become part of them."""
    readers = [
        port
        for port in convert.output(0).get_target_inputs()
        if port.get_index() == 1 and port.get_node().get_type_name() in _OF_TWO
    ]
    if readers and convert.input_value(0).get_node().get_type_name() != "Constant":
        apart = _apart(ov, convert).output(0)
        for port in readers:
            port.replace_source_output(apart)


def _apart(ov: Any, convert: Any) -> Any:
    """The same numbers by a layer that OpenVINO neither leaves out nor makes part of the next."""
    if convert.get_element_type().is_real():
        return ov.negative(ov.negative(convert))
    return ov.bitwise_not(ov.bitwise_not(convert))
