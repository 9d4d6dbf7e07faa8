"""Symbolic shapes: what each segment's inputs and outputs look like, and over which range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from intarsia.graph.border import Border
from intarsia.graph.sizes import Range, bytes_of, size_range, total_bytes


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
