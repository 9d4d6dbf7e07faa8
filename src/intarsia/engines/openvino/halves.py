"""Products and sums of bfloat16 in OpenVINO's own kernels for it, where the processor has such arithmetic.

Networks hold such products as float32 with a rounding after them, since ONNX Runtime has no kernels for
bfloat16. OpenVINO did so literally and read twice the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from intarsia.engines.openvino.core import capabilities, compile_model, core
from intarsia.engines.openvino.idioms import drop_neutral, keep_rank, rename, replace, scale_before_rounding
from intarsia.errors import EngineError

_PRODUCTS = frozenset({"Convolution", "GroupConvolution", "MatMul"})
_ELEMENTWISE = frozenset({"Add", "Multiply", "Negative", "Relu", "Subtract"})
_RESHAPES = frozenset({"Reshape", "Squeeze", "Transpose", "Unsqueeze"})


def shorten(model: Any) -> None:
    """Let products and sums of bfloat16 numbers that are rounded to bfloat16 be computed in it.

    Networks make float32 of what goes in and round what comes out, as torch defines these operators. So do
    OpenVINO's kernels of bfloat16, which compute in float32 inside: they read half the memory, have tiles to
    multiply with, and need no layers that convert. What a network computes in float32 for its own sake stays.
    """
    if "BF16" not in capabilities() or not any(map(_rounds, model.get_ops())):
        return
    drop_neutral(model)
    scale_before_rounding(model)
    for operation in model.get_ordered_ops():
        if operation.get_type_name() in _RESHAPES:
            _move_before_widening(operation)
    for operation in model.get_ordered_ops():
        kind = operation.get_type_name()
        if kind not in _PRODUCTS | _ELEMENTWISE:
            continue
        if kind == "Multiply" and _shorten_gate(operation):
            continue
        added = _added_before_rounding(operation, takes_bias=kind in _PRODUCTS)
        ports = [] if added is None else [*operation.inputs(), *added]
        if ports and all(is_short(port.get_source_output()) for port in ports):
            for port in ports:
                _read_short(port)
    model.validate_nodes_and_infer_types()
    for operation in model.get_ordered_ops():
        if _rounds(operation) and operation.get_input_element_type(0) == operation.get_element_type():
            replace(operation.output(0), operation.input_value(0))
    keep_rank(model)
    model.validate_nodes_and_infer_types()


def _rounds(operation: Any) -> bool:
    if operation.get_type_name() != "Convert":
        return False
    return bool(operation.get_element_type().get_type_name() == "bf16")


def _move_before_widening(move: Any) -> None:
    """Let a layer that moves numbers move those of bfloat16, and make float32 of its result."""
    from openvino import opset13 as ov

    if not is_widened(move.input_value(0)):
        return
    readers = move.output(0).get_target_inputs()
    _read_short(move.input(0))
    move.validate_and_infer_types()
    widened = ov.convert(move.output(0), "f32")
    for reader in readers:
        reader.replace_source_output(widened.output(0))


def _shorten_gate(product: Any) -> bool:
    """Let x * sigmoid(x), which OpenVINO computes in one layer, be rounded in that layer."""
    from openvino import opset13 as ov

    value, gate = product.input_values()
    if value.get_node().get_type_name() == "Sigmoid":
        value, gate = gate, value
    if gate.get_node().get_type_name() != "Sigmoid" or gate.get_node().input_value(0) != value:
        return False
    readers = [port.get_node() for port in product.output(0).get_target_inputs()]
    if len(readers) != 1 or not _rounds(readers[0]) or not is_widened(value):
        return False
    short = value.get_node().input_value(0)
    short_gate = ov.sigmoid(short)
    short_product = ov.multiply(short, short_gate)
    rename(value, short)
    rename(gate, short_gate.output(0))
    rename(product.output(0), short_product.output(0))
    replace(readers[0].output(0), short_product.output(0))
    return True


def _added_before_rounding(operation: Any, takes_bias: bool) -> list[Any] | None:
    """The other values read before the rounding of a result; None if anything else reads the result.

    On the way of a product are its bias and moves.
    """
    results: list[Any] = []
    value = operation.output(0)
    while len(readers := _readers_of_numbers(value)) == 1:
        (port,) = readers
        step = port.get_node()
        kind = step.get_type_name()
        if kind == "Convert":
            return results if _rounds(step) else None
        if kind == "Add" and takes_bias:
            other = step.input(1 - port.get_index())
            if not _is_constant(other.get_source_output()):
                return None
            results.append(other)
        elif kind not in _RESHAPES:
            return None
        value = step.output(0)
    return None


def _readers_of_numbers(value: Any) -> list[Any]:
    return [port for port in value.get_target_inputs() if port.get_node().get_type_name() != "ShapeOf"]


def is_short(value: Any) -> bool:
    """Whether a float32 value holds numbers of bfloat16 alone."""
    node = value.get_node()
    kind = node.get_type_name()
    if kind == "Constant":
        return value.get_element_type().get_type_name() == "f32" and _fits(node.get_data())
    return is_widened(value) or (kind in _RESHAPES and _is_constant(value) and is_short(node.input_value(0)))


def _fits(data: np.ndarray[Any, np.dtype[np.float32]]) -> bool:
    return not (data.view(np.uint32) & 0xFFFF).any()


def is_widened(value: Any) -> bool:
    node = value.get_node()
    if node.get_type_name() != "Convert" or value.get_element_type().get_type_name() != "f32":
        return False
    return bool(node.get_input_element_type(0).get_type_name() == "bf16")


def _read_short(port: Any) -> None:
    """Let a layer read the bfloat16 numbers that a float32 value was made of."""
    from openvino import opset13 as ov

    value = port.get_source_output()
    if not is_widened(value):
        port.replace_source_output(ov.convert(value, "bf16").output(0))
        return
    source = value.get_node().input_value(0)
    port.replace_source_output(source)
    rename(value, source)


def _is_constant(value: Any) -> bool:
    node = value.get_node()
    kind = node.get_type_name()
    if kind in _RESHAPES:  # to a shape that may be computed, of the rank of what it is added to
        return _is_constant(node.input_value(0))
    return bool(kind == "Constant")


# Gated layers of bfloat16 in the kernel that OpenVINO has for them, and nothing else made shorter by it.
#
# The kernel is used only where OpenVINO may compute everything in bfloat16, which exact programs may not. So
# the program is compiled with that permission, its runtime model shows which layers were shortened, and it is
# compiled again without if one of them should be exact. Marking layers as precise (`precise_0`) did not help:
# sums and softmax were rounded all the same (2026.4).

_HINT = {"INFERENCE_PRECISION_HINT": "bf16"}
_KERNEL, _NORM = "LLMMLP", "RMS"  # what OpenVINO calls the layers that it makes of gates and norms
_ASIDE = frozenset({"Constant", "Parameter", "Result", "ShapeOf"})
_MOVES = frozenset(
    {"Broadcast", "Concat", "Gather", "Reshape", "Select", "Slice", "Squeeze", "Transpose", "Unsqueeze"}
    | {"Split", "VariadicSplit"}
)
# The kernel keeps weights as float16, which has no number beyond the largest, and below 2**-14 multiples of
# 2**-24 alone; some number of each row must reach the least: what is rounded away is 2**-17 of it at most.
_LARGEST, _LEAST = 65504.0, 2.0**-8
# It gives halves of 32 numbers or more to pairs of threads: of less it adds what it has not computed, and
# by its source, without a pair, it divides by 0, which ends a process, or writes where it has no memory.
_SHORTEST = 64


def compiled(model: Any, config: Mapping[str, Any]) -> Any:
    """The compiled model, with that kernel where it is allowed.

    OpenVINO looks for its kernel only where it may compute all in bfloat16. So it gets that permission, and
    the result is checked: if something is rounded that a network computes in float32 for its own sake, it may
    not.
    """
    hint = config["INFERENCE_PRECISION_HINT"]
    if hint == "f32" and _suits(model) and _threads(config) % 2 == 0:
        result = core().compile_model(model, "CPU", {**config, **_HINT})
        if _rounds_no_more(result, model):
            return result
    if hint != "f32" and is_gated(model) and (threads := _threads(config)) % 2:
        raise EngineError(f"its kernel for gated layers takes pairs of threads, and there are {threads}")
    return compile_model(model, config)


def is_gated(model: Any) -> bool:
    """Whether a product reads what two values that vary were multiplied to."""
    for operation in model.get_ops():
        if operation.get_type_name() != "MatMul":
            continue
        source = operation.input_value(0).get_node()
        while source.get_type_name() in ("Convert", "Reshape"):
            source = source.input_value(0).get_node()
        factors = [value.get_node().get_type_name() for value in source.input_values()]
        if source.get_type_name() == "Multiply" and "Constant" not in factors:
            return True
    return False


def _suits(model: Any) -> bool:
    """Whether a product of bfloat16 is multiplied by its sigmoid, and the kernel can hold all weights."""
    if "BF16" not in capabilities() or not is_gated(model):
        return False
    short = [op for op in model.get_ops() if op.get_output_size() and _type(op.output(0)) == "bf16"]
    products = [op for op in short if op.get_type_name() == "MatMul"]
    gated = [op.input_value(0).get_node() for op in short if op.get_type_name() == "Sigmoid"]
    if not any(op.get_type_name() == "MatMul" for op in gated):
        return False
    return all(_fits_kernel(op.input_value(1).get_node()) for op in products)


def _fits_kernel(weight: Any) -> bool:
    while weight.get_type_name() in ("Convert", "Reshape", "Transpose"):
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
    if numbers.ndim != 2 or min(numbers.shape) < _SHORTEST:
        return False
    return all(_reaches(numbers, axis) for axis in (0, 1))  # either may be the rows


def _reaches(numbers: np.ndarray[Any, np.dtype[np.float32]], axis: int) -> bool:
    most = np.maximum(numbers.max(axis=axis, initial=0), -numbers.min(axis=axis, initial=0))
    return bool(((most == 0) | ((most >= _LEAST) & (most <= _LARGEST))).all())


def _threads(config: Mapping[str, Any]) -> int:
    """How many threads a model has that is compiled so: as configured, or as many as the process may use."""
    import openvino
    from openvino import opset13 as ov

    value = ov.parameter([1], np.float32)
    result = core().compile_model(openvino.Model([ov.relu(value)], [value]), "CPU", dict(config))
    return int(result.get_property("INFERENCE_NUM_THREADS"))


def _rounds_no_more(result: Any, model: Any) -> bool:
    """Whether the kernel is used, and layers that need float32 are still computed in it."""
    long, short, norms, match = set[str](), set[str](), set[str](), False
    for operation in result.get_runtime_model().get_ops():
        text = {key: value.astype(str) for key, value in operation.get_rt_info().items() if key in _TOLD}
        names = text["originalLayersNames"].split(",")
        match = match or text["layerType"] == _KERNEL
        if text["layerType"] == _NORM:
            norms.update(names)
        elif "bf16" in text["runtimePrecision"] + text["outputPrecisions"]:
            short.update(names)
        else:
            long.update(names)
    if not match:
        return False
    touching = [operation for operation in model.get_ops() if _touches_float32(operation)]
    for operation in touching:
        if operation.get_type_name() == "Multiply":
            layers = _layers_of_norm(operation, norms)
            long.update(layers if short.isdisjoint(layers) else [])
    return all(op.get_friendly_name() in long - short or _may_round(op) for op in touching)


_TOLD = frozenset({"layerType", "originalLayersNames", "outputPrecisions", "runtimePrecision"})


def _touches_float32(operation: Any) -> bool:
    """Whether a layer reads or makes float32 numbers, other than to widen or to round those of bfloat16."""
    if operation.get_type_name() in _ASIDE:
        return False
    types = [_type(value) for value in (*operation.input_values(), *operation.outputs())]
    return "f32" in types and not (operation.get_type_name() == "Convert" and "bf16" in types)


def _may_round(operation: Any) -> bool:
    """Whether nothing changes if a layer reads and makes bfloat16: it is given such, and rounded to it.

    A layer that moves numbers needs one of both, and what makes truth values or integers the first.
    """
    source = all(map(_holds_short, operation.input_values()))
    rounded = all(_type(value) != "f32" or _is_rounded(value) for value in operation.outputs())
    return (source or rounded) if operation.get_type_name() in _MOVES else (source and rounded)


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
        results = [node for node in read if node.get_type_name() == kind]
        if len(results) != 1:
            return []
        # Squares are computed once more for whoever else reads them, as guards do.
        if kind != "Power" and len(results[0].output(0).get_target_inputs()) != 1:
            return []
        layers += results
    source, names = layers[-1].input_value(0), [layer.get_friendly_name() for layer in layers]
    if names[1] not in norms or source not in layers[1].input_values() or not is_widened(source):
        return []
    return names if _is_rounded(last.output(0)) else []


def _type(value: Any) -> str:
    return str(value.get_element_type().get_type_name())
