"""Weights in 4 bits, packed once for several sessions: ONNX Runtime writes them to files and maps these.

A kernel packs the weight of its product into a layout of its own, and every session would hold a packed copy.
ONNX Runtime can write an optimized model together with packed weights. So a model of each product alone is
written, and the models of sessions name its file. Sessions over one file share its pages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
from onnx import NodeProto, TensorProto, helper

from intarsia.engines.onnxruntime.model import Model, Values
from intarsia.engines.shared_weights import SharedWeights
from intarsia.errors import first_line

_FEWEST = 1 << 16  # bytes of a weight that is worth a file
_IN_FLOATS = (0, 1)  # accuracy levels whose kernels pack the weight alone, without its scales
_WEIGHT, _ZERO = 1, 3  # places of inputs; between them are the scales


def with_mapped_weights(model: Model, shared: SharedWeights) -> Model:
    """The same model, whose weights in 4 bits lie packed in files of the folder."""
    held = {tensor.name: tensor for tensor in model.proto.graph.initializer}
    mapped = set[str]()
    for node in model.proto.graph.node:
        name = node.input[_WEIGHT] if _is_product_in_floats(node) else ""
        if name not in model.weights or name in mapped or any(n not in held for n in _constants(node)):
            continue
        try:
            with shared.lock:
                place = _place(node, held, model.weights, shared)
        except Exception as error:  # such as a full disk
            shared.problem = first_line(error)
            break
        if place is not None:
            del held[name].external_data[:]
            held[name].external_data.extend(place)
            mapped.add(name)
    weights = {name: value for name, value in model.weights.items() if name not in mapped}
    return replace(model, weights=weights)


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
