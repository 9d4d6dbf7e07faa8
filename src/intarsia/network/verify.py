"""What every network must hold, whoever made it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from intarsia.errors import NetworkError

if TYPE_CHECKING:
    from intarsia.network.network import Network


def verify(net: Network) -> None:
    """Raise NetworkError at the first thing wrong: order, ownership, names, types, uses."""
    names: set[str] = set()
    known: set[ir.Value] = set()

    def define(value: ir.Value, where: str) -> None:
        if not value.name:
            raise NetworkError(f"{where} makes a tensor without a name")
        if value.name in names:
            raise NetworkError(f"{where} makes {value.name}, a name already taken")
        if value.dtype is None or value.shape is None:
            raise NetworkError(f"{where} makes {value.name} without dtype or shape")
        names.add(value.name)
        known.add(value)

    for value in net.graph.inputs:
        define(value, "the network")
    for value in net.graph.initializers.values():
        if value not in known:
            define(value, "the network")
    for node in net.graph:
        for index, read in enumerate(node.inputs):
            if read is None:
                continue
            if read not in known:
                raise NetworkError(f"layer {node.name} reads {read.name} before it is made")
            if (node, index) not in read.uses():
                raise NetworkError(f"{read.name} does not know that layer {node.name} reads it")
        for value in node.outputs:
            define(value, f"layer {node.name}")
    for value in net.graph.outputs:
        if value not in known:
            raise NetworkError(f"output {value.name} is made by no layer of the network")
