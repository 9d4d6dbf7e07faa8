"""The inputs of Dynamo's graph by kind: weights, sizes, numbers and tensors.

Dynamo makes everything an input, parameters and sizes too, and marks the kind of an input by private names.
Only this file reads them, and `tests/backend/test_dynamo_graph.py` tests them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import sympy
import torch
from torch import fx
from torch.export import Dim

from intarsia.errors import CaptureError


class Kind(Enum):
    """The kind of an input of a graph."""

    WEIGHT = "a parameter, buffer or tensor attribute of a module"
    SIZE = "a size of one of the tensors"
    NUMBER = "an integer that varies between calls"
    SETTING = "a number of a module, which Dynamo passes as a tensor"
    TENSOR = "a tensor of the caller"


@dataclass(frozen=True)
class DynamoInput:
    """One input of a graph. `source` is Dynamo's name for it; a size is that of `tensor` in `axis`.

    `dims` has a range for each axis that varies; for a number, `dims` is its range.
    """

    kind: Kind
    source: str
    tensor: int = -1
    axis: int = -1
    dims: Any = None


def inputs_of(module: fx.GraphModule, inputs: Sequence[Any]) -> list[DynamoInput]:
    """The inputs of a graph that Dynamo passed to its backend, with their kinds."""
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    values = [_symbolic(node, value_now) for node, value_now in zip(nodes, inputs, strict=True)]
    sizes = _sizes(values)
    results = []
    for node, value, value_now in zip(nodes, values, inputs, strict=True):
        source = _source_name(node)
        if isinstance(value, torch.SymInt):
            place = sizes.get(str(value))
            if place is not None:
                results.append(DynamoInput(Kind.SIZE, source, *place))
            else:
                results.append(DynamoInput(Kind.NUMBER, source, dims=_range(value)))
        elif not isinstance(value, torch.Tensor):
            results.append(DynamoInput(Kind.NUMBER, source))
        elif _is_of_module(node, value_now):
            wrapped = getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False)
            results.append(DynamoInput(Kind.SETTING if wrapped else Kind.WEIGHT, source))
        else:
            ranges = {axis: _range(size) for axis, size in enumerate(value.shape)}
            vary = {axis: dim for axis, dim in ranges.items() if dim is not None}
            results.append(DynamoInput(Kind.TENSOR, source, dims=vary or None))
    return results


@contextlib.contextmanager
def apart_from_dynamo() -> Iterator[None]:
    """In the `with` block, tracing adds no guards to the frame that Dynamo compiles."""
    tracing = getattr(torch._guards, "tracing", None)
    if tracing is None:
        raise CaptureError(f"torch {torch.__version__} cannot trace inside a backend of torch.compile")
    with tracing(None):
        yield


def plain_number(value: Any) -> Any:
    """The value of a symbolic number in the example call; other values are unchanged."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.hint
    return value


def settled(node: fx.Node) -> bool:
    """Whether Dynamo's guards fix a number that is read from a tensor.

    With `dynamic=True`, every float attribute of a module (`eps`, `momentum`) is such an input.
    """
    value = node.meta.get("example_value")
    if isinstance(value, torch.SymFloat | torch.SymInt):
        return bool(value.node.shape_env.bound_sympy(value.node.expr).is_singleton())
    return isinstance(value, int | float)


def _symbolic(node: fx.Node, actual: Any) -> Any:
    """The input as Dynamo traced it: a tensor whose sizes may be symbols, or a symbol."""
    value = node.meta.get("example_value")
    return actual if value is None else value


def _sizes(values: Sequence[Any]) -> dict[str, tuple[int, int]]:
    """For each symbol, a tensor and an axis that has it as its size."""
    places: dict[str, tuple[int, int]] = {}
    for slot, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            for axis, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    places.setdefault(str(size), (slot, axis))
    return places


def _range(size: torch.SymInt | int) -> Any:
    """The range of a size by Dynamo's guards, for `torch.export`; None if it is one number."""
    if not isinstance(size, torch.SymInt):
        return None
    bounds = size.node.shape_env.bound_sympy(size.node.expr)
    if bounds.is_singleton():
        return None
    low, high = (int(b) if isinstance(b, sympy.Integer) else None for b in (bounds.lower, bounds.upper))
    return Dim.AUTO(min=None if low is None else max(low, 0), max=high)


def _source_name(node: fx.Node) -> str:
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", node.name)
    return str(name() if callable(name) else name)  # a method in torch 2.11


def _is_of_module(node: fx.Node, value: Any) -> bool:
    """Whether a tensor belongs to a module."""
    if not isinstance(value, torch.Tensor):
        return False
    if isinstance(value, torch.nn.Parameter):
        return True
    guarded = getattr(getattr(node, "_dynamo_source", None), "guard_source", None)
    guarded = guarded() if callable(guarded) else guarded
    return any(
        bool(getattr(guarded, ask, bool)())
        for ask in ("is_unspecialized_nn_module", "is_specialized_nn_module")
    )
