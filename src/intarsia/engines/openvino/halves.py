"""Products and sums of bfloat16 in OpenVINO's own kernels for it, where the processor has such arithmetic.

Networks hold such products as float32 with a rounding behind them, since ONNX Runtime has no kernels for
bfloat16. OpenVINO took that literally and read twice the memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from intarsia.engines.openvino.core import capabilities
from intarsia.engines.openvino.idioms import drop_neutral, keep_rank, rename, replace, scale_before_rounding

_PRODUCTS = frozenset({"Convolution", "GroupConvolution", "MatMul"})
_ELEMENTWISE = frozenset({"Add", "Multiply", "Negative", "Relu", "Subtract"})
_MOVES = frozenset({"Reshape", "Squeeze", "Transpose", "Unsqueeze"})


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
        if operation.get_type_name() in _MOVES:
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
    """What else is read on the way to the rounding of a result; None if anything but that reads it.

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
        elif kind not in _MOVES:
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
    return is_widened(value) or (kind in _MOVES and _is_constant(value) and is_short(node.input_value(0)))


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
    if kind in _MOVES:  # to a shape that may be computed, of the rank of what it is added to
        return _is_constant(node.input_value(0))
    return bool(kind == "Constant")
