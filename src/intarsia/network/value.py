"""What is known of a value of a graph: its name, dtype and shape, and its content where it is constant."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from intarsia.errors import NetworkError
from intarsia.network.shapes import Shape, known_dims
from intarsia.network.text import type_text


class TypedValue:
    """A read-only view of an `onnx_ir.Value`: what shape rules and checks ask of an operand."""

    __slots__ = ("value",)

    def __init__(self, value: ir.Value) -> None:
        self.value: ir.Value = value

    # A view has no identity of its own: two views of one value are equal.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, TypedValue) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"Tensor({self.name}: {type_text(self.value)})"

    @property
    def name(self) -> str:
        return self.value.name or ""

    @property
    def dtype(self) -> ir.DataType:
        dtype = self.value.dtype
        if dtype is None:
            raise NetworkError(f"tensor {self.name} has no dtype")
        return dtype

    @property
    def shape(self) -> Shape:
        shape = self.value.shape
        known = known_dims.get(id(shape))
        if known is not None:
            return known
        if shape is None:
            raise NetworkError(f"tensor {self.name} has no shape")
        return tuple(d if isinstance(d, int) else d.value for d in shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def constant(self) -> np.ndarray[Any, Any] | None:
        """The content, where it is known when the network is made."""
        content = self.value.const_value
        return None if content is None else content.numpy()
