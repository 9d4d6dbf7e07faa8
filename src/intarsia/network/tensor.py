"""A value of a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import torch

from intarsia.errors import NetworkError
from intarsia.network.edit.raw import shape_of, type_of
from intarsia.network.guard import default_net, network_of
from intarsia.network.types import Dim, Shape, known_dims

if TYPE_CHECKING:
    from intarsia.network.layer import Layer
    from intarsia.network.network import Network


class Tensor:
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

    __slots__ = ("value",)
    value: ir.Value

    def __init__(self, name: str, dtype: torch.dtype | ir.DataType, shape: Sequence[Dim]) -> None:
        self.value = default_net().add_input(name, dtype, shape).value

    @staticmethod
    def of(value: ir.Value) -> Tensor:
        """The view of a raw value."""
        view = object.__new__(Tensor)
        view.value = value
        return view

    # A view has no identity of its own: two views of one value are one tensor.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tensor) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        from intarsia.network.text import type_text

        return f"Tensor({self.name}: {type_text(self.value)})"

    @property
    def name(self) -> str:
        return self.value.name or ""

    @property
    def dtype(self) -> ir.DataType:
        kind = type_of(self.value)
        if kind is None:
            raise NetworkError(f"tensor {self.name} has no dtype")
        return kind.dtype  # type: ignore[no-any-return]

    @property
    def shape(self) -> Shape:
        shape = shape_of(self.value)
        known = known_dims.get(id(shape))
        if known is not None:
            return known
        if shape is None:
            raise NetworkError(f"tensor {self.name} has no shape")
        return tuple(d if isinstance(d, int) else d.value for d in shape)

    @property
    def ndim(self) -> int:
        return len(self.value.shape) if self.value.shape is not None else len(self.shape)

    @property
    def network(self) -> Network:
        graph = self.value.graph
        if graph is None:
            raise NetworkError(f"tensor {self.name} belongs to no network")
        return network_of(graph)

    @property
    def constant(self) -> np.ndarray[Any, Any] | None:
        """The value, where it is known when the network is made."""
        found = self.value.const_value
        return None if found is None else found.numpy()

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
