"""Symbolic shapes: what each segment's inputs and outputs look like, and over which range."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

if TYPE_CHECKING:
    from intarsia.graph.border import Border

Range = tuple[int, int | None]
"""The least size and the largest; None where there is no largest."""


@dataclass(frozen=True)
class ValueShape:
    """A value that crosses a border: its name, element type, sizes (numbers or expressions) and their ranges.

    `ranges` has one entry for every expression in `sizes`. A scalar has no sizes.
    """

    name: str
    dtype: str
    sizes: tuple[int | str, ...]
    ranges: Mapping[str, Range]
    bytes: int

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.sizes))}]"


@dataclass(frozen=True)
class SegmentShapes:
    """The shapes of everything a segment takes in and gives out, and the bytes that cross.

    Inputs of the graph are there anyway: they do not count as crossing.
    """

    inputs: tuple[ValueShape, ...]
    outputs: tuple[ValueShape, ...]
    bytes_in: int
    bytes_out: int


def segment_shapes(
    edges: Sequence[Border], bounds: Mapping[Any, tuple[int, int]] | None = None
) -> list[SegmentShapes]:
    """The shapes at every border, from the graph's fake tensors; nothing is run.

    `bounds` narrows symbols by what is known from elsewhere, such as an exported program's constraints.

    Example:
        >>> import intarsia
        >>> fast = intarsia.compile(torch.nn.ReLU(), (torch.ones(2, 3),), engines="pytorch")
        >>> graph = fast.plan.nodes[0].graph
        >>> from intarsia.graph.border import borders
        >>> print(segment_shapes(borders(graph, fast.plan.segments))[0].inputs[0])
        input_1: float32[2, 3]
    """
    return [
        SegmentShapes(
            tuple(value_shape(node, bounds) for node in border.inputs),
            tuple(value_shape(node, bounds) for node in border.outputs),
            total_bytes(node for node in border.inputs if node.op != "placeholder"),
            total_bytes(border.outputs),
        )
        for border in edges
    ]


def value_shape(node: fx.Node, bounds: Mapping[Any, tuple[int, int]] | None = None) -> ValueShape:
    """What `node`'s value looks like."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        kind = "unknown" if value is None else type(value).__name__
        return ValueShape(node.name, kind, (), {}, 0)
    shape: tuple[Any, ...] = tuple(value.shape)  # the stubs know no SymInt here
    sizes = tuple(size if isinstance(size, int) else str(size.node.expr) for size in shape)
    ranges = {str(s.node.expr): size_range(s, bounds) for s in shape if isinstance(s, torch.SymInt)}
    dtype = str(value.dtype).removeprefix("torch.")
    return ValueShape(node.name, dtype, sizes, ranges, bytes_of(value))


def size_range(size: Any, bounds: Mapping[Any, tuple[int, int]] | None = None) -> Range:
    """The least and the largest a size may be."""
    if not isinstance(size, torch.SymInt):
        return (int(size), int(size))
    expression = size.node.expr
    if bounds and expression in bounds:
        return bounds[expression]
    # The bound of an expression is known to the shape environment alone, and has no public door.
    bound_of = getattr(getattr(size.node, "shape_env", None), "bound_sympy", None)
    if bound_of is None:
        return (0, None)
    bound = bound_of(expression)
    return (_number(bound.lower) or 0, _number(bound.upper))


def size_hint(size: Any, default: int = 1) -> int:
    """A size as a number: a symbolic one gives the value the example had, or else `default`."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    hint = getattr(size.node, "hint", None)
    return int(hint) if isinstance(hint, int) else default


def bytes_of(value: object) -> int:
    """The bytes a value takes; symbolic sizes count by their hint."""
    if isinstance(value, torch.Tensor):
        count = value.element_size()
        for size in value.shape:
            count *= size_hint(size)
        return count
    if isinstance(value, (list, tuple)):
        return sum(bytes_of(item) for item in value)
    return 0


def total_bytes(nodes: Iterable[fx.Node]) -> int:
    """The bytes of all the nodes' values."""
    return sum(bytes_of(node.meta.get("val")) for node in nodes)


def _number(bound: Any) -> int | None:
    """A bound as a number; torch's infinities are those beyond what a size can be."""
    return int(bound) if bound.is_number and bound.is_finite and abs(int(bound)) < 2**62 else None
