"""Example inputs at the least and the largest sizes a compiled module allows, made from the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from intarsia.lower import Lowered

STRETCH = 4  # an open range is tried at this many times the example's size
MOST_ELEMENTS = 1 << 24  # no input of a corner may have more


def corners(lowered: Lowered, example: Sequence[Any]) -> list[list[Any]]:
    """The example with every varying size at its minimum, and at its maximum; empty if none varies.

    Values are the example's, repeated or cut, so that token ids stay in the vocabulary.
    """
    nodes = [node for node in lowered.module.graph.nodes if node.op == "placeholder"]
    shapes = [_shape(node.meta.get("val")) for node in nodes]
    seen: dict[sympy.Symbol, int] = {}
    for shape, value in zip(shapes, example, strict=True):
        for size, given in zip(shape or (), value.shape if shape else (), strict=True):
            if isinstance(size, sympy.Symbol):
                seen.setdefault(size, int(given))
    if not seen:
        return []
    made = []
    for largest in (False, True):
        sizes = {symbol: _bound(lowered, symbol, given, largest) for symbol, given in seen.items()}
        inputs = [_resized(x, shape, sizes) for x, shape in zip(example, shapes, strict=True)]
        if all(not isinstance(x, torch.Tensor) or x.numel() <= MOST_ELEMENTS for x in inputs):
            made.append(inputs)
    return made


def at_sizes(lowered: Lowered, example: Sequence[Any], sizes: dict[sympy.Symbol, int]) -> list[Any]:
    """The example with some of the varying sizes set, the others as they are."""
    nodes = [node for node in lowered.module.graph.nodes if node.op == "placeholder"]
    shapes = [_shape(node.meta.get("val")) for node in nodes]
    known: dict[sympy.Symbol, int] = {}
    for shape, value in zip(shapes, example, strict=True):
        for size, given in zip(shape or (), value.shape if shape else (), strict=True):
            if isinstance(size, sympy.Symbol):
                known.setdefault(size, int(given))
    known |= sizes
    return [_resized(x, shape, known) for x, shape in zip(example, shapes, strict=True)]


def _shape(value: Any) -> tuple[Any, ...] | None:
    if not isinstance(value, torch.Tensor):
        return None
    shape = tuple(size if isinstance(size, int) else size.node.expr for size in value.shape)
    return None if all(isinstance(size, int) for size in shape) else shape


def _bound(lowered: Lowered, symbol: sympy.Symbol, given: int, largest: bool) -> int:
    allowed = lowered.range_constraints.get(symbol)
    if allowed is None:
        return given
    if not largest:
        return max(0, int(allowed.lower))
    reach = max(given, 1) * STRETCH
    return int(min(allowed.upper, reach)) if allowed.upper.is_number and allowed.upper < 2**31 else reach


def _resized(value: Any, shape: tuple[Any, ...] | None, sizes: dict[sympy.Symbol, int]) -> Any:
    if shape is None:
        return value
    for axis, size in enumerate(shape):
        wanted = size if isinstance(size, int) else int(size.subs(sizes))
        have = value.shape[axis]
        if wanted == have:
            continue
        if have == 0:
            value = value.new_zeros((*value.shape[:axis], wanted, *value.shape[axis + 1 :]))
        else:
            value = value.index_select(axis, torch.arange(wanted, device=value.device) % have)
    return value
