"""Layers rewritten in the form that OpenVINO's fusions look for.

OpenVINO's fusions know one way of writing each: a rotary embedding joined along axis -1 and not 3, a norm's
weight before the rounding, products of three dimensions. No other engine asks for this, so it is done after
the network is read.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def show_rotations(model: Any) -> None:
    """Let the halves of rotary embeddings be put together along axis -1.

    Only then does OpenVINO see an embedding, and compute it in one kernel instead of five. It would also
    match some that are not (halves in their own places, an angle for a whole row): those are not rewritten.
    """
    for operation in model.get_ops():
        if operation.get_type_name() == "Add" and (halves := _rotated_halves(operation)) is not None:
            halves.set_attribute("axis", -1)


def _rotated_halves(total: Any) -> Any:
    """The layer that makes (-b, a) of (a, b), if a sum is (a, b) * cos + (-b, a) * sin; else None."""
    for straight, turned in _both_ways(total):
        if (
            straight.get_node().get_type_name() != "Multiply"
            or turned.get_node().get_type_name() != "Multiply"
        ):
            return None
        for joined, sin in _both_ways(turned.get_node()):
            whole = _turned(joined.get_node())
            for value, cos in _both_ways(straight.get_node()) if whole is not None else ():
                if value == whole and _spans(cos, whole) and _spans(sin, whole):
                    return joined.get_node()
    return None


def _both_ways(operation: Any) -> list[list[Any]]:
    """The operands of a sum or a product, in either order."""
    return [operation.input_values(), operation.input_values()[::-1]]


def _turned(joined: Any) -> Any:
    """The value (a, b) of four dimensions whose halves a layer puts together as (-b, a); None of others."""
    if joined.get_type_name() != "Concat" or joined.get_attributes()["axis"] != 3:
        return None
    parts = joined.input_values()
    if len(parts) != 2 or parts[0].get_node().get_type_name() != "Negative":
        return None
    last, first = _part(parts[0].get_node().input_value(0)), _part(parts[1])
    if last is None or first is None or last[0] != first[0]:
        return None
    whole = first[0]
    size = whole.get_partial_shape()[3].get_length()
    return whole if first[1:] == (0, size // 2) and last[1:] == (size // 2, size) and size % 2 == 0 else None


def _part(value: Any) -> tuple[Any, int, int] | None:
    """The value that it is a slice of, along the last of four dimensions, with start and end."""
    node = value.get_node()
    kind = node.get_type_name()
    if kind not in ("Slice", "Split", "VariadicSplit"):
        return None
    source, *text = node.input_values()
    shape = source.get_partial_shape()
    numbers = [_integers(one) for one in text]
    if shape.rank.is_dynamic or shape.rank.get_length() != 4 or shape[3].is_dynamic or None in numbers:
        return None
    size = int(shape[3].get_length())
    if kind == "Slice":
        if any(len(one) != 1 for one in numbers if one is not None) or len(numbers) != 4:
            return None
        start, stop, step, axis = (one[0] for one in numbers if one is not None)
        if step != 1 or axis not in (3, -1):
            return None
        return source, *(min(max(at + size if at < 0 else at, 0), size) for at in (start, stop))
    if numbers[0] not in ([3], [-1]):
        return None
    place = value.get_index()
    lengths = numbers[1] if len(numbers) > 1 else None
    if lengths is None:
        each = size // int(node.get_attributes()["num_splits"])
        return source, place * each, (place + 1) * each
    if min(lengths) < 0:
        return None
    return source, sum(lengths[:place]), sum(lengths[: place + 1])


def _integers(value: Any) -> list[int] | None:
    node = value.get_node()
    if node.get_type_name() != "Constant":
        return None
    return [int(number) for number in np.atleast_1d(node.get_data()).reshape(-1)]


def _spans(angle: Any, whole: Any) -> bool:
    """Whether there is an angle for each number of a row, and none beyond what is turned."""
    source, shape = angle.get_partial_shape(), whole.get_partial_shape()
    if source.rank.is_dynamic or source.rank.get_length() != 4 or source[3] != shape[3]:
        return False
    return all(source[axis] == shape[axis] or source[axis] == 1 for axis in range(3))


def drop_neutral(model: Any) -> None:
    """Take out the factors 1 and the summand 0 that the reader of a Gemm makes."""
    for operation in model.get_ordered_ops():
        kind, result = operation.get_type_name(), operation.get_output_partial_shape(0)
        for value, other in _both_ways(operation) if kind in ("Add", "Multiply") else ():
            if other.get_partial_shape() != result:
                continue
            # A model's own sum with 0 makes 0 of -0.0.
            is_bias = kind == "Add" and other.get_node().get_type_name() == "MatMul" and _is_scalar(value, 0)
            if is_bias or (kind == "Multiply" and _is_scalar(value, 1)):
                replace(operation.output(0), other)
                break


def _is_scalar(value: Any, number: int) -> bool:
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


def show_norms(model: Any) -> None:
    """Write x / sqrt(mean of squares) as a quotient: then OpenVINO computes the squares in float32.

    Where it computes in float16, a hundred squares of 30 are too many for it; a power of -1 hides the
    squares.
    """
    from openvino import opset13 as ov

    for operation in model.get_ordered_ops():
        if operation.get_type_name() != "Power":
            continue
        root, exponent = operation.input_values()
        if root.get_node().get_type_name() == "Sqrt" and _is_minus_one(exponent.get_node()):
            one = ov.constant(np.array(1.0), root.get_element_type())
            replace(operation.output(0), ov.divide(one, root).output(0))


def _is_minus_one(node: Any) -> bool:
    return node.get_type_name() == "Constant" and bool((node.get_data() == -1).all())


def keep_rank(model: Any) -> None:
    """Let products with a weight take operands of three dimensions, without reshapes to rows and back.

    A gate of three such products is one kernel, which looks for them without layers between.
    """
    from openvino import opset13 as ov

    for operation in model.get_ordered_ops():
        if operation.get_type_name() != "Reshape":
            continue
        result, bias = operation.input_value(0), None
        if result.get_node().get_type_name() == "Add" and len(result.get_target_inputs()) == 1:
            result, bias = result.get_node().input_values()
        product = result.get_node()
        if product.get_type_name() != "MatMul" or len(result.get_target_inputs()) != 1:
            continue
        rows, weight = product.input_values()
        flags = product.get_attributes()
        if rows.get_node().get_type_name() != "Reshape" or not _is_matrix(weight) or flags["transpose_a"]:
            continue
        source = rows.get_node().input_value(0)
        if bias is not None and not _is_of_columns(bias):
            continue
        if not _differ_in_last(source.get_partial_shape(), operation.get_output_partial_shape(0)):
            continue
        if source.get_partial_shape()[2] != rows.get_partial_shape()[1]:
            continue
        new = ov.matmul(source, weight, False, flags["transpose_b"])
        whole = new if bias is None else ov.add(new, bias)
        rename(rows, source)
        rename(result, new.output(0))
        rename(operation.input_value(0), whole.output(0))
        replace(operation.output(0), whole.output(0))


def _is_matrix(value: Any) -> bool:
    return _is_constant(value) and len(value.get_shape()) == 2


def _is_of_columns(value: Any) -> bool:
    """Whether it is a constant with a number for each column, the same for all rows."""
    return _is_constant(value) and len(value.get_shape()) > 0 and value.get_shape()[:-1] in ([], [1])


def _is_constant(value: Any) -> bool:
    """Whether it is a constant, maybe to be rounded."""
    node = value.get_node()
    if node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    return bool(node.get_type_name() == "Constant")


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
    """Redirect all readers of one value to another with the same numbers."""
    for reader in old.get_target_inputs():
        reader.replace_source_output(new)
    rename(old, new)


def rename(old: Any, new: Any) -> None:
    """Give a value the names of another that holds the same numbers: guards look for names."""
    new.add_names(old.get_names())
    old.set_names(set())
