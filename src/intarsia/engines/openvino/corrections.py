"""Corrections of OpenVINO's errors on every processor: layers, weights in few bits, shared weights."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from intarsia.engines.openvino.idioms import replace
from intarsia.network import Layer, Network, Tensor
from intarsia.network.serialize import Weights, drop_initializers, replace_nodes

# Weights in few bits that OpenVINO widens as it reads them, and the tables that it would read wrongly.
#
# OpenVINO rounds activations wherever it sees constants of 8 bits, and its kernel for short tables knows one
# scale a row and writes past its memory otherwise, which no comparison notices in time.


_SHORT = frozenset({"i8", "u8", "i4", "u4", "f8e4m3", "f8e5m2", "nf4"})


def has_short_weights(model: Any) -> bool:
    """Whether a model has constants of 8 bits or less, other than single numbers and truth values."""
    constants = (op for op in model.get_ops() if op.get_type_name() == "Constant")
    return any(_is_short(op) for op in constants)


def _is_short(constant: Any) -> bool:
    return constant.get_element_type().to_string() in _SHORT and math.prod(constant.get_output_shape(0)) > 1


def fold_tables(model: Any) -> None:
    """Compute the table of a `Gather` if it depends on constants alone.

    Its kernel for tables in 8 bits takes one scale for a row; given one for a column it reads past its end.
    """
    import openvino

    for gather in [op for op in model.get_ops() if op.get_type_name() == "Gather"]:
        table = gather.input_value(0)
        if table.get_node().get_type_name() == "Constant" or not is_constant(table.get_node()):
            continue
        fold(openvino.Model([table], [], "table"))


def fold(model: Any) -> None:
    """Compute all values that depend on constants alone, also in nodes that a model shares."""
    from openvino.passes import ConstantFolding, Manager

    passes = Manager()
    passes.register_pass(ConstantFolding())
    passes.run_passes(model)


def is_constant(node: Any) -> bool:
    """Whether a node depends on constants alone."""
    waiting, seen = [node], set()
    while waiting:
        one = waiting.pop()
        if one.get_type_name() == "Parameter":
            return False
        name = one.get_name()
        if name not in seen:
            seen.add(name)
            waiting += [value.get_node() for value in one.input_values()]
    return True


# Weights that several products read in different ways: OpenVINO packs them for one, and gives it to all.
#
# OpenVINO knows packed weights by address and sizes. A square matrix that is multiplied by rows and by
# columns, as in tied encoders and decoders, got the packed form of the first use. The copy costs the memory
# of one weight.


_PRODUCTS = frozenset(
    {"Convolution", "ConvolutionBackpropData", "GroupConvolution", "GroupConvolutionBackpropData", "MatMul"}
)


def separate(model: Any) -> None:
    """Give memory of its own to every way in which products read one weight.

    OpenVINO (2026.4) knows packed weights by where they lie and by their sizes. Of a square matrix that is
    read by rows here and by columns there, and of filters that are used in both directions, there was one
    packed form: the others got wrong numbers. A matrix that is read in another shape may be mistaken, too.
    """
    import openvino

    for ways in _readers(model).values():
        for index, ports in enumerate(list(ways.values())[1:]):
            for port in ports:
                if port.get_source_output().get_node().get_type_name() != "Constant":
                    fold(openvino.Model([port.get_source_output()], [], "weight"))
            constant = ports[0].get_source_output().get_node()
            memory = openvino.Tensor(constant.get_element_type(), constant.get_output_shape(0))
            constant.get_tensor_view().copy_to(memory)
            copy = openvino.op.Constant(memory)
            copy.set_friendly_name(f"{constant.get_friendly_name()}_read_otherwise_{index}")
            for port in ports:
                port.replace_source_output(copy.output(0))


def _readers(model: Any) -> dict[object, dict[object, list[Any]]]:
    """The ports of products, by the place of the weight that they read and its packed sizes, and the way."""
    results: dict[object, dict[object, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for product in model.get_ordered_ops():
        if product.get_type_name() not in _PRODUCTS:
            continue
        attributes = product.get_attributes()
        flags = [attributes.get(name) for name in ("transpose_a", "transpose_b")]
        for port in product.inputs():
            value = port.get_source_output()
            if value.get_partial_shape().is_dynamic or not is_constant(value.get_node()):
                continue
            shape = tuple(value.get_shape())
            place, changes = _origin(value.get_node())
            way = (product.get_type_name(), port.get_index(), *flags, shape, changes)
            results[place, _packed_sizes(shape, way)][way].append(port)
    return results


def _packed_sizes(shape: tuple[int, ...], way: tuple[object, ...]) -> tuple[int, ...]:
    """Sizes that two ways must differ in, not to be mistaken for each other: of a matrix rows and columns."""
    kind, port, _, turned = way[:4]
    if kind != "MatMul" or port != 1 or len(shape) < 2:
        return tuple(sorted(shape))
    *rest, rows, columns = shape
    return (*rest, columns, rows) if turned else shape


def _origin(node: Any) -> tuple[int, tuple[object, ...]]:
    """The address of the weight that a constant value is computed from, and the layers that compute it."""
    changes: list[object] = []
    while node.get_type_name() != "Constant":
        text = [value.get_node() for value in node.input_values()[1:]]
        numbers = [
            one.data.tobytes() if one.get_type_name() == "Constant" else one.get_name() for one in text
        ]
        changes.append((node.get_type_name(), repr(node.get_attributes()), *numbers))
        node = node.input_value(0).get_node()
    return node.data.ctypes.data, tuple(changes)


# Exact layers in the place of those that OpenVINO's kernels get wrong on every processor.


_BITS = {"i8": 8, "u8": 8, "i16": 16, "u16": 16}


def correct(model: Any) -> None:
    """Replace inexact layers with exact ones."""
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
            if (result := last_bits(ov, operation)) is not None:
                replace(operation.output(0), result.output(0))
        elif kind == "Add" and (other := _plus_zero(operation)) is not None:
            # OpenVINO leaves out a sum with 0, which makes 0 of -0.0.
            zero = ov.constant(np.array(0.0), other.get_element_type())
            replace(operation.output(0), ov.select(ov.equal(other, zero), zero, other).output(0))


def _plus_zero(total: Any) -> Any:
    """The operand that a single 0 is added to; None for other sums."""
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
    bits, operand = _BITS.get(kind), source.get_element_type()
    if bits is None or not operand.is_integral_number() or operand.bitwidth <= bits:
        return None
    number = functools.partial(scalar, ov, source)
    last = ov.bitwise_and(source, number(2**bits - 1))
    if kind.startswith("i"):
        last = ov.subtract(ov.bitwise_xor(last, number(2 ** (bits - 1))), number(2 ** (bits - 1)))
    return ov.convert(last, kind)


def scalar(ov: Any, like: Any, value: float) -> Any:
    """A constant of another value's type."""
    return ov.constant(np.array(value), like.get_element_type())


# Products with weights in 4 or 8 bits: constants that OpenVINO's kernels widen as they read them.
#
# ONNX writes such a product as one layer, which OpenVINO's reader unfolds only where its weight is a
# constant; weights are inputs while it reads. So it reads a plain product, and what computes the weight of
# constants over torch's memory is put in once all passes that fold constants are through.

_KIND = "MatMulNBits"


@dataclass(frozen=True)
class PackedWeight:
    """The weight of a product, as numpy arrays, and the input that represents it."""

    name: str
    layer: Layer


def has_few_bits(net: Network) -> bool:
    """Whether a product reads a weight in few bits."""
    return any(layer.as_layer().op_type == _KIND for layer in net.get_layers())


def as_inputs(net: Network, proto: Any, weights: Weights) -> list[PackedWeight]:
    """Let a model take the weights of such products as inputs, and multiply by them as they are."""
    layers = {
        layer.get_outputs()[0].name: layer for layer in net.get_layers() if layer.as_layer().op_type == _KIND
    }
    if not layers:
        return []
    results = list[PackedWeight]()

    def plain_product(node: NodeProto) -> list[NodeProto]:
        if node.op_type != _KIND:
            return [node]
        result = node.output[0]
        packed = PackedWeight(f"{result}_weight", layers[result])
        results.append(packed)
        sizes = [packed.layer.attribute(size) for size in "KN"]
        proto.graph.input.append(helper.make_tensor_value_info(packed.name, TensorProto.FLOAT, sizes))
        bias = node.input[5] if len(node.input) > 5 else ""
        product = f"{result}_product" if bias else result
        nodes = [helper.make_node("MatMul", [node.input[0], packed.name], [product], name=node.name)]
        if bias:
            nodes.append(helper.make_node("Add", [product, bias], [result], name=f"{node.name}_bias"))
        return nodes

    replace_nodes(proto.graph, plain_product)
    read = {name for node in proto.graph.node for name in node.input}
    drop_initializers(proto.graph, {tensor.name for tensor in proto.graph.initializer} - read)
    for name in set(weights) - read:
        del weights[name]
    return results


def put_in(model: Any, packed: list[PackedWeight]) -> list[Any]:
    """Replace these inputs with the weights; the returned object keeps their memory alive."""
    from openvino import opset13 as ov

    parameters = {name: p for p in model.get_parameters() for name in p.output(0).get_names()}
    memory: list[Any] = []
    for one in packed:
        parameter = parameters[one.name]
        weight = _weight(one.layer, memory)
        for port in parameter.output(0).get_target_inputs():
            product = port.get_node()
            turned = ov.matmul(product.input_value(0), weight, False, True)
            turned.set_friendly_name(product.get_friendly_name())
            replace(product.output(0), turned.output(0))
        model.remove_parameter(parameter)
    model.validate_nodes_and_infer_types()
    return memory


def _weight(layer: Layer, memory: list[Any]) -> Any:
    """`(integers - zeros) * scales` in rows by columns, as the CPU plugin's products take it."""
    from openvino import opset13 as ov

    _, weight, scale, zero = (_array(tensor) for tensor in (*layer.get_inputs(), None)[:4])
    rows, columns, bits, block = (layer.attribute(name) for name in ("N", "K", "bits", "block_size"))
    assert weight is not None and scale is not None
    zeros = None if zero is None else _unpacked(zero, bits)[:, : scale.shape[1]]
    is_one_group = bool((scale == scale[:, :1]).all()) and (
        zeros is None or bool((zeros == zeros[:, :1]).all())
    )
    shape: tuple[int, ...] = (rows, columns)
    if is_one_group:
        weight = weight.reshape(rows, -1)[:, : columns * bits // 8]
        scale, zeros = scale[:, :1], None if zeros is None else zeros[:, :1]
    else:
        scale, zeros = scale[:, :, None], None if zeros is None else zeros[:, :, None]
        shape = (rows, columns // block, block)
    numbers = ov.convert(_constant(weight, bits, shape, memory), "f32")
    if zeros is None:
        middle = ov.convert(ov.constant(np.array(2 ** (bits - 1), np.uint8)), "f32")
    else:
        middle = ov.convert(_constant(zeros, 8, zeros.shape, memory), "f32")
    result = ov.multiply(ov.subtract(numbers, middle), _constant(scale, 32, scale.shape, memory))
    return result if is_one_group else ov.reshape(result, ov.constant(np.array([rows, columns])), False)


def _constant(array: Any, bits: int, shape: tuple[int, ...], memory: list[Any]) -> Any:
    import openvino

    held = np.ascontiguousarray(array)
    kind = {4: openvino.Type.u4, 8: openvino.Type.u8, 32: openvino.Type.f32}[bits]
    tensor = openvino.Tensor(held, list(shape), kind)
    memory += [held, tensor]
    return openvino.op.Constant(tensor)


def _array(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.constant


def _unpacked(zeros: Any, bits: int) -> Any:
    return zeros if bits == 8 else np.stack([zeros & 15, zeros >> 4], -1).reshape(len(zeros), -1)
