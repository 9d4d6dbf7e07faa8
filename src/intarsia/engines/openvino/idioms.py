"""Layers written the way OpenVINO's fusions look for them, where they could be written in several."""

from __future__ import annotations

from typing import Any

import numpy as np


def show_rotations(model: Any) -> None:
    """Let the halves of a rotary embedding be put together along axis -1.

    Only then does OpenVINO see the embedding, and compute it in one kernel instead of five. It would also
    take parts for halves that are none, and what it rotates for as large as the result: those stay hidden.
    """
    for operation in model.get_ops():
        if operation.get_type_name() == "Concat" and _is_of_halves(operation):
            operation.set_attribute("axis", -1)


def _is_of_halves(operation: Any) -> bool:
    parts = [value.get_partial_shape() for value in operation.input_values()]
    if len(parts) != 2 or any(shape.rank.is_dynamic or shape.rank.get_length() != 4 for shape in parts):
        return False
    one, other = (shape[3] for shape in parts)
    if one.is_dynamic or one != other or operation.get_attributes()["axis"] != 3:
        return False
    made = operation.get_output_partial_shape(0)
    return all(_is_product(port.get_node(), made) for port in operation.output(0).get_target_inputs())


def _is_product(operation: Any, shape: Any) -> bool:
    """Whether it is a product of this shape; of bfloat16 numbers there is float32 in between."""
    if operation.get_type_name() == "Convert":
        readers = operation.output(0).get_target_inputs()
        return all(_is_product(port.get_node(), shape) for port in readers)
    return bool(operation.get_type_name() == "Multiply" and operation.get_output_partial_shape(0) == shape)


def drop_neutral(model: Any) -> None:
    """Take out the factors 1 and the summand 0 that the reader of a Gemm makes."""
    for operation in model.get_ordered_ops():
        neutral = {"Multiply": 1.0, "Add": 0.0}.get(operation.get_type_name())
        if neutral is None:
            continue
        for value, other in zip(operation.input_values(), reversed(operation.input_values()), strict=True):
            if _is_scalar(value, neutral) and other.get_partial_shape() == operation.get_output_partial_shape(
                0
            ):
                replace(operation.output(0), other)
                break


def _is_scalar(value: Any, number: float) -> bool:
    node = value.get_node()
    if node.get_type_name() != "Constant" or value.get_element_type().get_type_name() != "f32":
        return False
    data = node.get_data()
    return bool(data.size == 1 and data.item() == number and not np.signbit(data.item()))


def scale_before_rounding(model: Any) -> None:
    """Let what a norm made of bfloat16 numbers be multiplied by its weight before it is rounded, not between.

    OpenVINO computes a root mean square norm in one kernel, its weight included; there is one rounding less.
    """
    for operation in model.get_ordered_ops():
        if operation.get_type_name() != "Multiply":
            continue
        for port, other in zip(operation.inputs(), reversed(operation.input_values()), strict=True):
            scaled = port.get_source_output()
            source = _before_rounding(scaled)
            if source is not None and _is_norm(source) and other.get_node().get_type_name() == "Constant":
                port.replace_source_output(source)
                rename(scaled.get_node().input_value(0), source)
                rename(scaled, source)
                break


def _before_rounding(value: Any) -> Any:
    """The float32 value that was rounded to bfloat16 and widened to this one; None for any other."""
    for wanted in ("f32", "bf16"):
        if (
            value.get_node().get_type_name() != "Convert"
            or value.get_element_type().get_type_name() != wanted
        ):
            return None
        value = value.get_node().input_value(0)
    return value if value.get_element_type().get_type_name() == "f32" else None


def _is_norm(value: Any) -> bool:
    """Whether it is x / sqrt(...), as norms without a mean write it."""
    factors = [factor.get_node() for factor in value.get_node().input_values()]
    if value.get_node().get_type_name() != "Multiply":
        return False
    return any(
        factor.get_type_name() == "Divide" and factor.input_value(1).get_node().get_type_name() == "Sqrt"
        for factor in factors
    )


def keep_rank(model: Any) -> None:
    """Let products with a weight take what has three dimensions as it is, not as rows and back again.

    A gate of three such products is one kernel, which looks for them without layers between.
    """
    from openvino import opset13 as ov

    for operation in model.get_ordered_ops():
        if operation.get_type_name() != "Reshape":
            continue
        made, bias = operation.input_value(0), None
        if made.get_node().get_type_name() == "Add" and len(made.get_target_inputs()) == 1:
            made, bias = made.get_node().input_values()
        product = made.get_node()
        if product.get_type_name() != "MatMul" or len(made.get_target_inputs()) != 1:
            continue
        rows, weight = product.input_values()
        flags = product.get_attributes()
        if rows.get_node().get_type_name() != "Reshape" or not _is_weight(weight) or flags["transpose_a"]:
            continue
        source = rows.get_node().input_value(0)
        if bias is not None and not _is_weight(bias):
            continue
        if not _differ_in_last(source.get_partial_shape(), operation.get_output_partial_shape(0)):
            continue
        if source.get_partial_shape()[2] != rows.get_partial_shape()[1]:
            continue
        new = ov.matmul(source, weight, False, flags["transpose_b"])
        whole = new if bias is None else ov.add(new, bias)
        rename(rows, source)
        rename(made, new.output(0))
        rename(operation.input_value(0), whole.output(0))
        replace(operation.output(0), whole.output(0))


def _is_weight(value: Any) -> bool:
    """Whether it is a constant of at most two dimensions, maybe to be rounded."""
    node = value.get_node()
    if node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    return bool(node.get_type_name() == "Constant" and value.get_partial_shape().rank.get_length() <= 2)


def _differ_in_last(one: Any, other: Any) -> bool:
    """Whether both have three dimensions, and the same but for the last, as sizes of as many rows."""
    if any(shape.rank.is_dynamic or shape.rank.get_length() != 3 for shape in (one, other)):
        return False
    if one[2].is_dynamic or other[2].is_dynamic:
        return False
    unknown = [one[axis].is_dynamic or other[axis].is_dynamic for axis in (0, 1)]
    if all(unknown):
        return False
    return all(unknown[axis] or one[axis] == other[axis] for axis in (0, 1))


def replace(old: Any, new: Any) -> None:
    """Let all that reads one value read another, of the same numbers."""
    for reader in old.get_target_inputs():
        reader.replace_source_output(new)
    rename(old, new)


def rename(old: Any, new: Any) -> None:
    """Let a value be found by the names of one that holds the same numbers: guards look for names."""
    new.add_names(old.get_names())
    old.set_names(set())
