"""A value of a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import torch

from intarsia.errors import NetworkError
from intarsia.network.guard import default_net, network_of
from intarsia.network.types import Dim
from intarsia.network.value import TypedValue

if TYPE_CHECKING:
    from intarsia.network.layer import Layer
    from intarsia.network.network import Network


class Tensor(TypedValue):
    """A value of a network: what a layer makes or a network is given.

    `Tensor(name=..., dtype=..., shape=...)` adds an input to the network under guard.

    >>> from intarsia.network import Network, Tensor, net_guard
    >>> net = Network()
    >>> with net_guard(net):
    ...     a = Tensor("a", torch.float32, (2, "n"))
    ...     (a + 1.0).mark_output("b")
    >>> print(net)
    network(a: f32[2, n]) -> (b: f32[2, n])
      b = Add(a, 1.0)
    """

    __slots__ = ()

    def __init__(self, name: str, dtype: torch.dtype | ir.DataType, shape: Sequence[Dim]) -> None:
        super().__init__(default_net().add_input(name, dtype, shape).value)

    @staticmethod
    def of(value: ir.Value) -> Tensor:
        """The view of a raw value."""
        view = object.__new__(Tensor)
        view.value = value
        return view

    @property
    def network(self) -> Network:
        graph = self.value.graph
        if graph is None:
            raise NetworkError(f"tensor {self.name} belongs to no network")
        return network_of(graph)

    def get_parent(self) -> Layer | None:
        """The layer that makes this tensor; None for inputs and constants."""
        from intarsia.network.layer import Layer

        producer = self.value.producer()
        return None if producer is None else Layer(producer)

    def get_users(self) -> list[Layer]:
        """The layers that read this tensor, each once, in order of use."""
        from intarsia.network.layer import Layer

        return [Layer(node) for node in dict.fromkeys(use.node for use in self.value.uses())]

    def is_output(self) -> bool:
        return self.value.is_graph_output()

    def is_input(self) -> bool:
        return self.value.is_graph_input()

    def mark_output(self, name: str | None = None) -> None:
        """Make this tensor an output of its network."""
        default_net(self).mark_output(self, name)

    def replace_all_uses_with(self, new: Tensor) -> None:
        """Let every reader of this tensor, and the network's outputs, read `new` instead."""
        self.network.replace_all_uses(self, new)

    # Operators are filled in by functional.py, which knows the operations.
    if TYPE_CHECKING:

        def __add__(self, other: Any) -> Tensor: ...
        def __radd__(self, other: Any) -> Tensor: ...
        def __sub__(self, other: Any) -> Tensor: ...
        def __rsub__(self, other: Any) -> Tensor: ...
        def __mul__(self, other: Any) -> Tensor: ...
        def __rmul__(self, other: Any) -> Tensor: ...
        def __truediv__(self, other: Any) -> Tensor: ...
        def __rtruediv__(self, other: Any) -> Tensor: ...
        def __pow__(self, other: Any) -> Tensor: ...
        def __matmul__(self, other: Any) -> Tensor: ...
        def __neg__(self) -> Tensor: ...
        def __lt__(self, other: Any) -> Tensor: ...
        def __gt__(self, other: Any) -> Tensor: ...
        def __le__(self, other: Any) -> Tensor: ...
        def __ge__(self, other: Any) -> Tensor: ...
        def __and__(self, other: Any) -> Tensor: ...
        def __or__(self, other: Any) -> Tensor: ...
        def __invert__(self) -> Tensor: ...
