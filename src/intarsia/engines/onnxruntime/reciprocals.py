"""Reciprocals by division, on processors of ARM.

There ONNX Runtime's kernel approaches a reciprocal step by step: that of a denormal becomes an infinity of
the wrong sign, which signbit, copysign and atan2 are made of, and others are off by their last bit.
"""

from __future__ import annotations

from typing import Any

from onnx import helper

from intarsia.network import Network

_PREFIX = "intarsia_one"


def divide_for_reciprocals(net: Network, model: Any) -> None:
    """Let the model divide 1 by what it would take the reciprocal of."""
    dtypes = {tensor.name: tensor.dtype for layer in net.get_layers() for tensor in layer.get_outputs()}
    made: set[str] = set()
    for node in model.graph.node:
        if node.op_type != "Reciprocal" or node.output[0] not in dtypes:
            continue
        dtype = dtypes[node.output[0]]
        one = f"{_PREFIX}_{dtype.name}"
        if one not in made:
            model.graph.initializer.append(helper.make_tensor(one, int(dtype), [], [1.0]))
            made.add(one)
        node.op_type = "Div"
        node.input.insert(0, one)
