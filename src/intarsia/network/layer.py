"""One operation of a network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from intarsia.errors import NetworkError
from intarsia.network.attributes import from_attr
from intarsia.network.edit.raw import graph_of
from intarsia.network.guard import network_of
from intarsia.network.tensor import Tensor

if TYPE_CHECKING:
    from intarsia.network.network import Network


class Layer:
    """One operation of a network."""

    __slots__ = ("node",)

    def __init__(self, node: ir.Node) -> None:
        self.node = node

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layer) and self.node is other.node

    def __hash__(self) -> int:
        return id(self.node)

    def __repr__(self) -> str:
        from intarsia.network.text import layer_text

        return f"Layer({layer_text(self.node)})"

    @property
    def name(self) -> str:
        return self.node.name or ""

    @property
    def kind(self) -> str:
        """The operator: `Add`, or `com.microsoft::BiasGelu` outside ONNX's own domain."""
        node = self.node
        return f"{node.domain}::{node.op_type}" if node.domain else node.op_type

    @property
    def network(self) -> Network:
        graph = graph_of(self.node)
        if graph is None:
            raise NetworkError(f"layer {self.name} was removed from its network")
        return network_of(graph)

    def as_layer(self) -> ir.Node:
        """The raw `onnx_ir` node."""
        return self.node

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute as a Python value."""
        attr = self.node.attributes.get(name)
        return default if attr is None else from_attr(attr)

    def get_inputs(self, *indices: int) -> list[Tensor | None]:
        """The inputs at these positions, or all; an input left out is None."""
        values = self.node.inputs if not indices else [self.node.inputs[i] for i in indices]
        return [None if value is None else Tensor.of(value) for value in values]

    def get_outputs(self, *indices: int) -> list[Tensor]:
        """The outputs at these positions, or all."""
        values = self.node.outputs if not indices else [self.node.outputs[i] for i in indices]
        return [Tensor.of(value) for value in values]

    def replace_input(self, index: int, new: Tensor) -> None:
        """Let this layer alone read `new` at this position."""
        self.network.replace_use(self, index, new)

    def mark_as_removed(self) -> None:
        """Take this layer out of its network; nothing may read it any more."""
        if self.node.graph is not None:
            self.network.remove(self)

    def is_removed(self) -> bool:
        return self.node.graph is None
