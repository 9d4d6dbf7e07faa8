"""Products whose weights have 8 or 4 bits, by ONNX Runtime's own tool, which is silent here."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx import NodeProto, TensorProto, helper, numpy_helper

from intarsia.engines.building import SharedWeights
from intarsia.engines.onnxruntime.corrections import names_read
from intarsia.errors import EngineError, first_line
from intarsia.network import Layer, Network, Tensor
from intarsia.network import functional as F
from intarsia.network.serialize import Weights, drop_initializers, to_proto

Values = dict[str, tuple[Any, object]]  # weights for a session, each with what keeps its memory alive

# ONNX Runtime's quantization tools, without their log messages and changes to logging.


@contextmanager
def silent_tool() -> Iterator[None]:
    """A context in which tools log only errors; afterwards the root logger is as before."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    root.setLevel(logging.ERROR)
    tools = logging.getLogger("onnxruntime.quantization")
    before = tools.level
    tools.setLevel(logging.ERROR)
    try:
        yield
    finally:
        tools.setLevel(before)
        root.setLevel(level)
        root.handlers[:] = handlers


# A network as a model whose products have weights of few bits: `MatMulNBits`, by ONNX Runtime's own tool.
#
# Each product goes through ONNX Runtime's quantizer as a model of its own: no model of 2 GB is made, and
# other weights stay where torch has them.


_INTEGER_PRODUCTS = 4  # the accuracy level at which kernels round activations to 8 bits
_LARGEST = 2**31 - 2**20  # bytes that one ONNX model can hold
_DOMAIN = "com.microsoft"
_PREFIX = "intarsia_short"


def with_short_weights(net: Network, *, bits: int, block: int) -> tuple[Any, Weights]:
    """The model, and the weights that it names but does not hold: those that no product reads.

    Each product goes through the tool by itself, so that at most one weight is in memory twice.
    """
    proto, weights = to_proto(net)
    ranks = {t.name: len(t.shape) for layer in net.get_layers() for t in layer.get_inputs() if t is not None}
    nodes: list[NodeProto] = []
    size = 0
    for node in proto.graph.node:
        for attribute in node.attribute if node.op_type == "MatMulNBits" else ():  # weights that came short
            if attribute.name == "accuracy_level":
                attribute.i = _INTEGER_PRODUCTS
        matrix = _matrix(node, weights) if ranks.get(node.input[0] if node.input else "", 0) >= 2 else None
        if matrix is None:
            nodes.append(node)
            continue
        result, held = _product(node, matrix, bits, block)
        nodes += result
        proto.graph.initializer.extend(held)
        size += sum(tensor.ByteSize() for tensor in held)
        if size > _LARGEST:
            raise EngineError(f"weights of {bits} bits take more than {_LARGEST} bytes, the limit of a model")
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    if all(known.domain != _DOMAIN for known in proto.opset_import):
        proto.opset_import.append(helper.make_opsetid(_DOMAIN, 1))
    return proto, _still_read(proto, weights)


def _matrix(node: NodeProto, weights: Weights) -> np.ndarray[Any, Any] | None:
    """The float32 weight of a product as rows by columns; None if it is not a weight of this form."""
    if node.domain or node.op_type not in ("MatMul", "Gemm") or node.input[1] not in weights:
        return None
    weight = weights[node.input[1]]
    if weight.dtype != ir.DataType.FLOAT or len(weight.shape) != 2:
        return None
    text = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    if text.get("transA", 0) or text.get("alpha", 1.0) != 1.0 or text.get("beta", 1.0) != 1.0:
        return None
    matrix = torch.as_tensor(weight.numpy())  # which is turned round by several threads
    return (matrix.t() if text.get("transB", 0) else matrix).contiguous().numpy()


def _product(
    node: NodeProto, matrix: np.ndarray[Any, Any], bits: int, block: int
) -> tuple[list[NodeProto], list[TensorProto]]:
    """A product with short weights, what is added to it, and the weights."""
    with silent_tool():  # importing the tool sets up logging
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

        result = node.output[0]
        added = [name for name in node.input[2:] if name]
        product = f"{_PREFIX}_product_{result}" if added else result
        # Weights that several products read are there once for each: their names are the products'.
        weight = numpy_helper.from_array(matrix, f"{_PREFIX}_weight_{result}")
        alone = helper.make_node("MatMul", [node.input[0], weight.name], [product], name=node.name)
        graph = helper.make_graph([alone], "product", [], [], [weight])
        tool = MatMulNBitsQuantizer(
            helper.make_model(graph), bits=bits, block_size=block, accuracy_level=_INTEGER_PRODUCTS
        )
        tool.process()
    output = tool.model.model.graph
    nodes = list(output.node)
    if added:
        nodes.append(helper.make_node("Add", [product, added[0]], [result], name=f"{node.name}_added"))
    return nodes, list(output.initializer)


def _still_read(proto: Any, weights: Weights) -> Weights:
    """The weights that are still read; the others leave the model."""
    unread = set(weights) - names_read(proto.graph)
    drop_initializers(proto.graph, unread)
    return {name: array for name, array in weights.items() if name not in unread}


# Products whose weights came in 8 bits, as two products of 4 bits.
#
# Unless activations may be rounded, ONNX Runtime 1.31 has kernels for 4 bits alone: of 8 it makes a weight of
# floats at every call, which took 235 ms where two products of 4 bits take 4 (2048 x 8192, one row).


def has_products_of_bytes(net: Network) -> bool:
    """Whether a product reads a weight in 8 bits."""
    return any(map(_is_product_of_bytes, net.get_layers()))


def with_halved_bytes(net: Network) -> Network:
    """A copy with sums for weights in 8 bits: 16 times the upper halves of bytes, and the lower halves."""
    return net.with_replaced(_is_product_of_bytes, _halved) if has_products_of_bytes(net) else net


def is_half(layer: Layer) -> bool:
    """Whether a product in 4 bits may be one of two that are added for a weight in 8 bits."""
    if layer.kind != f"{_DOMAIN}::MatMulNBits":
        return False
    x, result = layer.node.inputs[0], layer.node.outputs[0]
    sums = (use.node for use in result.uses() if use.node.op_type == "Add")
    others = (value.producer() for node in sums for value in node.inputs if value not in (None, result))
    return any(o is not None and o.op_type == layer.node.op_type and o.inputs[0] is x for o in others)


def _is_product_of_bytes(layer: Layer) -> bool:
    return layer.kind == f"{_DOMAIN}::MatMulNBits" and layer.attribute("bits") == 8


def _halved(layer: Layer) -> Tensor:
    x, weight, scale, zero, _, bias = (*layer.get_inputs(), None, None, None)[:6]
    assert x is not None
    content, scales = _numbers(weight), _numbers(scale)
    zeros = np.full(scales.shape, 128, np.uint8) if zero is None else _numbers(zero).reshape(scales.shape)

    def product(half: Any, factor: float, added: Tensor | None) -> Tensor:
        return F.matmul_nbits(
            x,
            F.constant(half(content[..., ::2]) | half(content[..., 1::2]) << 4),
            F.constant(scales * np.float32(factor)),
            F.constant(_in_bytes(half(zeros))),
            added,
            rows=layer.attribute("N"),
            columns=layer.attribute("K"),
            bits=4,
            block=layer.attribute("block_size"),
        )

    return F.add(product(lambda b: b >> 4, 16.0, bias), product(lambda b: b & 15, 1.0, None))


# Products of 8-bit integers, whose weights are unsigned where that is exact.
#
# ONNX Runtime's kernels for uint8 by int8 are by far its fastest (128 x 768 by 768 x 768 with AMX: 0.08 ms,
# uint8 by uint8 1.0 ms; 1.31.1). Without dot products of 8 bits (VNNI), those for x86 add pairs of products
# in 16 bits, which saturate. There uint8 by uint8 is exact and almost as fast (1.4 ms and 1.1 ms with AVX2).


def needs_unsigned_weights(net: Network) -> bool:
    """Whether there are products of integers that would saturate on this processor."""
    return any(map(_is_product_of_integers, net.get_layers())) and saturates()


def with_unsigned_weights(net: Network) -> Network:
    """A copy whose products of integers read weights as uint8, if those of int8 saturate here."""
    return net.with_replaced(_is_product_of_integers, _unsigned) if needs_unsigned_weights(net) else net


def _unsigned(layer: Layer) -> Tensor:
    x, weight, x_scale, scale, x_zero, zero, bias = (*layer.get_inputs(), None, None, None)[:7]
    zeros = np.zeros((), np.int8) if zero is None else _numbers(zero)
    unsigned, middle = (F.constant(n.view(np.uint8) ^ 128) for n in (_numbers(weight), zeros))
    inputs = (x, unsigned, x_scale, scale, x_zero, middle, bias)
    return F.op("MatMulIntegerToFloat", *inputs, domain=_DOMAIN)


def _is_product_of_integers(layer: Layer) -> bool:
    if layer.kind != f"{_DOMAIN}::MatMulIntegerToFloat":
        return False
    x, weight = layer.get_inputs(0, 1)
    assert x is not None and weight is not None
    return (x.dtype, weight.dtype) == (ir.DataType.UINT8, ir.DataType.INT8) and weight.constant is not None


@functools.cache
def saturates() -> bool:
    """Whether products of uint8 by int8 saturate on this processor: the largest there are, tried once."""
    import onnxruntime as ort

    x = np.full((8, 64), 255, np.uint8)
    weight = np.full((64, 8), 127, np.int8)
    weight[:, ::2] = -128
    node = helper.make_node("MatMulInteger", ["x", "weight"], ["sums"])
    held = helper.make_tensor("weight", TensorProto.INT8, weight.shape, weight.tobytes(), raw=True)
    ports = [
        helper.make_tensor_value_info("x", TensorProto.UINT8, [None, 64]),
        helper.make_tensor_value_info("sums", TensorProto.INT32, [None, 8]),
    ]
    graph = helper.make_graph([node], "sums", ports[:1], ports[1:], [held])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return not all(
        np.array_equal(session.run(None, {"x": rows})[0], rows.astype(np.int32) @ weight.astype(np.int32))
        for rows in (x, x[:1])  # a single row has a kernel of its own
    )


def _numbers(tensor: Tensor | None) -> np.ndarray[Any, Any]:
    assert tensor is not None and tensor.constant is not None
    return tensor.constant


def _in_bytes(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    even = np.pad(numbers, ((0, 0), (0, numbers.shape[1] % 2)))
    result: np.ndarray[Any, Any] = even[:, ::2] | even[:, 1::2] << 4
    return result


# Weights in 4 bits, packed once for several sessions: ONNX Runtime writes them to files and maps these.
#
# A kernel packs the weight of its product into a layout of its own, and every session would hold a packed
# copy. ONNX Runtime can write an optimized model together with packed weights. So a model of each product
# alone is written, and the models of sessions name its file. Sessions over one file share its pages.

_FEWEST = 1 << 16  # bytes of a weight that is worth a file
_IN_FLOATS = (0, 1)  # accuracy levels whose kernels pack the weight alone, without its scales
_WEIGHT, _ZERO = 1, 3  # places of inputs; between them are the scales


def map_weights(proto: Any, weights: Values, shared: SharedWeights) -> Values:
    """Let a model read weights in 4 bits from files, where they lie packed; returns the other weights."""
    held = {tensor.name: tensor for tensor in proto.graph.initializer}
    mapped = set[str]()
    for node in proto.graph.node:
        name = node.input[_WEIGHT] if _is_product_in_floats(node) else ""
        if name not in weights or name in mapped or any(n not in held for n in _constants(node)):
            continue
        try:
            with shared.lock:
                place = _place(node, held, weights, shared)
        except Exception as error:  # such as a full disk
            shared.problem = first_line(error)
            break
        if place is not None:
            del held[name].external_data[:]
            held[name].external_data.extend(place)
            mapped.add(name)
    return {name: value for name, value in weights.items() if name not in mapped}


def _is_product_in_floats(node: NodeProto) -> bool:
    if node.op_type != "MatMulNBits":
        return False
    levels = [attribute.i for attribute in node.attribute if attribute.name == "accuracy_level"]
    bits = [attribute.i for attribute in node.attribute if attribute.name == "bits"]
    return bits == [4] and all(level in _IN_FLOATS for level in levels)


def _constants(node: NodeProto) -> list[str]:
    """The names of weight, scales and zero points."""
    return [name for name in node.input[_WEIGHT : _ZERO + 1] if name]


def _place(
    node: NodeProto, held: Mapping[str, TensorProto], values: Values, shared: SharedWeights
) -> Any | None:
    """Where the weight lies, as external data of ONNX; None for a weight that is not worth a file."""
    weight: Any = values[node.input[_WEIGHT]][1]
    if weight.nbytes < _FEWEST:
        return None
    attributes = sorted(attribute.SerializeToString() for attribute in node.attribute)
    contents = hashlib.sha256(b"".join(attributes))
    for name in _constants(node):
        contents.update(values[name][1] if name in values else held[name].SerializeToString())  # type: ignore[arg-type]
    key = contents.digest()
    if key not in shared.places:
        shared.places[key] = _written(node, held, values, Path(shared.folder), f"{len(shared.places)}")
    return shared.places[key]


def _written(
    node: NodeProto, held: Mapping[str, TensorProto], values: Values, folder: Path, name: str
) -> list[Any]:
    """Write the product alone, with its weight as it is and packed; where the weight lies in that file."""
    import onnxruntime as ort

    product = NodeProto()
    product.CopyFrom(node)
    del product.input[:], product.output[:]
    product.input.extend(["x", *node.input[_WEIGHT : _ZERO + 1]])
    product.output.append("y")
    ports = [helper.make_tensor_value_info(port, TensorProto.FLOAT, None) for port in "xy"]
    constants = _constants(node)
    graph = helper.make_graph([product], "product", ports[:1], ports[1:], [held[one] for one in constants])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(node.domain, 1)]
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.optimized_model_filepath = str(folder / f"{name}.onnx")
    for key, value in {
        "session.save_external_prepacked_constant_initializers": "1",
        "session.optimized_model_external_initializers_file_name": f"{name}.bin",
        "session.optimized_model_external_initializers_min_size_in_bytes": str(_FEWEST),
    }.items():
        options.add_session_config_entry(key, value)
    outside = [one for one in constants if one in values]
    options.add_external_initializers(outside, [values[one][0] for one in outside])
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    written = onnx.load(folder / f"{name}.onnx", load_external_data=False).graph.initializer
    (place,) = (list(one.external_data) for one in written if one.name == node.input[_WEIGHT])
    _check_size(folder / f"{name}.bin", place)
    return place


def _check_size(file: Path, place: list[Any]) -> None:
    """Raise OSError for a file that ends too early; to read from it would end the process."""
    at = {entry.key: entry.value for entry in place}
    ends = [int(at["offset"]) + int(at["length"])]
    for key, value in at.items():
        if key.startswith("prepacked"):  # a name, then `offset;length;padding` of each buffer
            parts = (part.split(";") for part in value.split("|")[1:])
            ends += [int(offset) + int(length) for offset, length, *_ in parts]
    if file.stat().st_size < max(ends):
        raise OSError(f"{file} has {file.stat().st_size} bytes instead of {max(ends)}")
