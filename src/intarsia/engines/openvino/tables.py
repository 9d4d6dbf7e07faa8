"""Weights in few bits that OpenVINO widens as it reads them, and the tables that it would read wrongly.

OpenVINO rounds activations wherever it sees constants of 8 bits, and its kernel for short tables knows one
scale a row and writes past its memory otherwise, which no comparison notices in time.
"""

from __future__ import annotations

import math
from typing import Any

_SHORT = frozenset({"i8", "u8", "i4", "u4", "f8e4m3", "f8e5m2", "nf4"})


def has_short_weights(model: Any) -> bool:
    """Whether a model has constants of 8 bits or less, other than single numbers and truth values."""
    constants = (op for op in model.get_ops() if op.get_type_name() == "Constant")
    return any(_is_short(op) for op in constants)


def _is_short(constant: Any) -> bool:
    return constant.get_element_type().to_string() in _SHORT and math.prod(constant.get_output_shape(0)) > 1


def fold_tables(model: Any) -> None:
    """Make numbers of what `Gather` reads from, where it is computed of constants alone.

    Its kernel for tables in 8 bits takes one scale for a row; given one for a column it reads past its end.
    """
    import openvino

    for gather in [op for op in model.get_ops() if op.get_type_name() == "Gather"]:
        table = gather.input_value(0)
        if table.get_node().get_type_name() == "Constant" or not is_constant(table.get_node()):
            continue
        fold(openvino.Model([table], [], "table"))


def fold(model: Any) -> None:
    """Make numbers of all that is computed of constants alone, in the nodes that a model shares, too."""
    from openvino.passes import ConstantFolding, Manager

    passes = Manager()
    passes.register_pass(ConstantFolding())
    passes.run_passes(model)


def is_constant(node: Any) -> bool:
    """Whether only constants lead to a node."""
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
