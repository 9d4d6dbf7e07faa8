"""Gated layers of bfloat16 in the kernel that OpenVINO has for them, and nothing else made shorter by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from intarsia.engines.openvino.core import capabilities, core
from intarsia.engines.openvino.halves import is_short, is_widened

_HINT = {"INFERENCE_PRECISION_HINT": "bf16"}
_KERNEL, _NORM = "LLMMLP", "RMS"  # what OpenVINO calls the layers that it makes of gates and norms
_ASIDE = frozenset({"Constant", "Convert", "Parameter", "Result", "ShapeOf"})
_MOVES = frozenset(
    {"Broadcast", "Concat", "Gather", "Reshape", "Select", "Slice", "Squeeze", "Transpose", "Unsqueeze"}
    | {"Split", "VariadicSplit"}
)
# The kernel keeps weights as float16: the largest there is, and what some number of a row must reach, or what
# float16 rounds away would show beside it.
_LARGEST, _LEAST = 65504.0, 2.0**-12


def compiled(model: Any, config: Mapping[str, Any]) -> tuple[Any, dict[str, str]]:
    """The compiled model, and with which settings beside those that were told.

    OpenVINO looks for its kernel only where it may compute all in bfloat16. So it may, and what came of it is
    looked at: if something is rounded that a network computes in float32 for its own sake, it may not.
    """
    if config.get("INFERENCE_PRECISION_HINT") == "f32" and _has_gate(model):
        made = core().compile_model(model, "CPU", {**config, **_HINT})
        if _rounds_no_more(made, model):
            return made, dict(_HINT)
    return core().compile_model(model, "CPU", dict(config)), {}


def _has_gate(model: Any) -> bool:
    """Whether a product of bfloat16 is multiplied by its sigmoid, and float16 can hold all weights."""
    if "BF16" not in capabilities():
        return False
    short = [op for op in model.get_ops() if op.get_output_size() and _type(op.output(0)) == "bf16"]
    products = [op for op in short if op.get_type_name() == "MatMul"]
    gated = [op.input_value(0).get_node() for op in short if op.get_type_name() == "Sigmoid"]
    if not any(op.get_type_name() == "MatMul" for op in gated):
        return False
    return all(_fits_float16(op.input_value(1).get_node()) for op in products)


def _fits_float16(weight: Any) -> bool:
    if weight.get_type_name() == "Convert":
        weight = weight.input_value(0).get_node()
    if weight.get_type_name() != "Constant":
        return True
    kind = weight.get_element_type().get_type_name()
    if kind == "bf16":
        bits = np.frombuffer(weight.data.tobytes(), np.uint16).astype(np.uint32) << 16
        numbers = bits.view(np.float32).reshape(weight.get_output_shape(0))
    elif kind == "f32":
        numbers = weight.get_data()
    else:
        return False
    rows = np.maximum(numbers.max(axis=-1, initial=0), -numbers.min(axis=-1, initial=0))
    return bool(((rows == 0) | ((rows >= _LEAST) & (rows <= _LARGEST))).all())


def _rounds_no_more(made: Any, model: Any) -> bool:
    """Whether the kernel is there, and what computes in float32 does so still, or might as well not."""
    long, norms, found = set[str](), set[str](), False
    for operation in made.get_runtime_model().get_ops():
        told = {key: value.astype(str) for key, value in operation.get_rt_info().items() if key in _TOLD}
        names = told["originalLayersNames"].split(",")
        found = found or told["layerType"] == _KERNEL
        if told["layerType"] == _NORM:
            norms.update(names)
        if "bf16" not in told["runtimePrecision"] + told["outputPrecisions"]:
            long.update(names)
    layers = model.get_ops() if found else []
    for layer in layers:
        if layer.get_type_name() == "Multiply":
            long.update(_layers_of_norm(layer, norms))
    return found and all(
        op.get_friendly_name() in long or _is_sandwiched(op) for op in layers if _is_long(op)
    )


_TOLD = frozenset({"layerType", "originalLayersNames", "outputPrecisions", "runtimePrecision"})


def _is_long(operation: Any) -> bool:
    """Whether a layer computes float32 numbers."""
    return operation.get_type_name() not in _ASIDE | _MOVES and _type(operation.output(0)) == "f32"


def _is_sandwiched(operation: Any) -> bool:
    """Whether a layer reads numbers of bfloat16 and is rounded to it: then it may as well compute in it."""
    return all(map(_holds_short, operation.input_values())) and _is_rounded(operation.output(0))


def _holds_short(value: Any) -> bool:
    if _type(value) != "f32" or is_short(value):
        return True
    node = value.get_node()
    return node.get_type_name() in _MOVES and all(map(_holds_short, node.input_values()))


def _is_rounded(value: Any) -> bool:
    """Whether a value is read as bfloat16 alone, moved or not."""
    for port in value.get_target_inputs():
        reader = port.get_node()
        kind = reader.get_type_name()
        if kind == "ShapeOf" or (kind == "Convert" and _type(reader.output(0)) == "bf16"):
            continue
        if kind not in _MOVES or not all(map(_is_rounded, reader.outputs())):
            return False
    return True


def _layers_of_norm(last: Any, norms: set[str]) -> list[str]:
    """The names of the layers of a norm of bfloat16 numbers that is one layer, with float32 inside it.

    `last` is its product with a weight, `norms` what such layers were made of.
    """
    layers = [last]
    for kind in ("Multiply", "Divide", "Sqrt", "Add", "ReduceMean", "Power"):
        read = [value.get_node() for value in layers[-1].input_values()]
        found = [node for node in read if node.get_type_name() == kind]
        if len(found) != 1:
            return []
        layers += found
    source, names = layers[-1].input_value(0), [layer.get_friendly_name() for layer in layers]
    if names[1] not in norms or source not in layers[1].input_values() or not is_widened(source):
        return []
    return names if _is_rounded(last.output(0)) else []


def _type(value: Any) -> str:
    return str(value.get_element_type().get_type_name())
