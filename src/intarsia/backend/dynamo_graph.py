"""What Dynamo's graph is called with: weights, sizes, numbers and tensors, each identified.

Dynamo lifts everything to an input, parameters and sizes too. Dynamo marks the kind of each input by private
names; only this file reads them, and `tests/backend/test_dynamo_graph.py` watches them.
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
    NUMBER = "a whole number that varies from call to call"
    SETTING = "a number of a module, which Dynamo hands over as a tensor"
    TENSOR = "a tensor of the caller"


@dataclass(frozen=True)
class DynamoInput:
    """One input of a graph. `source` is where Dynamo found it; a size is that of `tensor` in `axis`.

    `dims` has a range for each axis that varies; for a number, `dims` is its range.
    """

    kind: Kind
    source: str
    tensor: int = -1
    axis: int = -1
    dims: Any = None


def inputs_of(module: fx.GraphModule, inputs: Sequence[Any]) -> list[DynamoInput]:
    """Each input of a graph that Dynamo passed to its backend, by its kind."""
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    values = [_symbolic(node, value_now) for node, value_now in zip(nodes, inputs, strict=True)]
    sizes = _sizes(values)
    known = []
    for node, value, value_now in zip(nodes, values, inputs, strict=True):
        source = _source_name(node)
        if isinstance(value, torch.SymInt):
            place = sizes.get(str(value))
            if place is not None:
                known.append(DynamoInput(Kind.SIZE, source, *place))
            else:
                known.append(DynamoInput(Kind.NUMBER, source, dims=_range(value)))
        elif not isinstance(value, torch.Tensor):
            known.append(DynamoInput(Kind.NUMBER, source))
        elif _is_of_module(node, value_now):
            wrapped = getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False)
            known.append(DynamoInput(Kind.SETTING if wrapped else Kind.WEIGHT, source))
        else:
            ranges = {axis: _range(size) for axis, size in enumerate(value.shape)}
            vary = {axis: held for axis, held in ranges.items() if held is not None}
            known.append(DynamoInput(Kind.TENSOR, source, dims=vary or None))
    return known


@contextlib.contextmanager
def apart_from_dynamo() -> Iterator[None]:
    """A context in which tracing does not add guards to the frame that Dynamo is compiling."""
    tracing = getattr(torch._guards, "tracing", None)
    if tracing is None:
        raise CaptureError(f"torch {torch.__version__} has no way to trace inside of torch.compile's backend")
    with tracing(None):
        yield


def plain_number(value: Any) -> Any:
    """A symbolic number as the number it is in the example call."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.hint
    return value


def settled(node: fx.Node) -> bool:
    """Whether Dynamo's guards say of a number read out of a tensor that it is always the same.

    With `dynamic=True` every float attribute of a module (`eps`, `momentum`) arrives that way.
    """
    value = node.meta.get("example_value")
    if isinstance(value, torch.SymFloat | torch.SymInt):
        return bool(value.node.shape_env.bound_sympy(value.node.expr).is_singleton())
    return isinstance(value, int | float)


def _symbolic(node: fx.Node, given: Any) -> Any:
    """The input as Dynamo saw it: a tensor whose sizes may be symbols, or a symbol."""
    value = node.meta.get("example_value")
    return given if value is None else value


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
    """What Dynamo's guards let a size be, as `torch.export` takes it; None where it is one number."""
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
