"""Products with weights in 4 or 8 bits: constants that OpenVINO's kernels widen as they read them.

ONNX writes such a product as one layer, which OpenVINO's reader unfolds only where its weight is a constant;
weights are inputs while it reads. So it reads a plain product, and what computes the weight of constants over
torch's memory is put in once all passes that fold constants are through.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from intarsia.engines.openvino.idioms import replace as read_instead
from intarsia.network import Layer, Network, Tensor
from intarsia.network.serialize import Weights

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
    nodes = list(proto.graph.node)
    del proto.graph.node[:]
    for node in nodes:
        if node.op_type != _KIND:
            proto.graph.node.append(node)
            continue
        result = node.output[0]
        packed = PackedWeight(f"{result}_weight", layers[result])
        results.append(packed)
        bias = node.input[5] if len(node.input) > 5 else ""
        product = f"{result}_product" if bias else result
        proto.graph.node.append(
            helper.make_node("MatMul", [node.input[0], packed.name], [product], name=node.name)
        )
        if bias:
            proto.graph.node.append(
                helper.make_node("Add", [product, bias], [result], name=f"{node.name}_bias")
            )
        sizes = [packed.layer.attribute(size) for size in "KN"]
        proto.graph.input.append(helper.make_tensor_value_info(packed.name, TensorProto.FLOAT, sizes))
    read = {name for node in proto.graph.node for name in node.input}
    remaining = [tensor for tensor in proto.graph.initializer if tensor.name in read]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(remaining)
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
            read_instead(product.output(0), turned.output(0))
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
