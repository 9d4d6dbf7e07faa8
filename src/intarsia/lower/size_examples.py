"""Example inputs at other sizes: the ends of the ranges, and sizes between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch

from intarsia.capture.size_guards import holds, read_guards
from intarsia.lower import Lowered

STRETCH = 4  # an open range is tried up to this many times the example's size
MOST_BYTES = 2 << 30  # of all values of the graph at the tried sizes
_AT_ONCE_BYTES = 256 << 20  # of all values; beyond, each size is at its maximum in a call of its own
_NEIGHBOURS = 16  # sizes that are tried, from an end inwards, until the guards allow one


def corners(lowered: Lowered, example: Sequence[Any], notes: list[str] | None = None) -> list[list[Any]]:
    """The example with all varying sizes at their minimum, and at their maximum; empty if none varies.

    In a large model, each size is at its maximum in a call of its own.
    Values are the example's, repeated or cut, so that token ids stay in the vocabulary. If a maximum needs
    too much memory, a smaller size is used, and `notes` says so.
    """
    sizes_of_example = _varying(lowered, example)
    if not sizes_of_example:
        return []
    inputs_at_ends = []
    for ends in _ends(lowered, sizes_of_example):
        sizes = _affordable(lowered, sizes_of_example, ends)
        if sizes != ends and notes is not None:
            notes.append(_untried(ends, sizes, lowered))
        inputs = _allowed(lowered, example, sizes_of_example, sizes)
        if inputs is not None:
            inputs_at_ends.append(inputs)
            least = min(ends.values())
            if notes is not None and sizes == ends and least > 0 and _varying(lowered, inputs) != ends:
                where = ", ".join(f"{symbol} = {size}" for symbol, size in ends.items())
                notes.append(f"calls at {where} are refused: conditions of the exported model exclude them")
        elif notes is not None:
            where = ", ".join(f"{symbol} = {size}" for symbol, size in sizes.items())
            notes.append(f"not verified at {where}, which the conditions of the exported model do not allow")
    return inputs_at_ends


def _ends(lowered: Lowered, sizes_of_example: dict[sympy.Symbol, int]) -> list[dict[sympy.Symbol, int]]:
    """All sizes at their minimum, and at their maximum: at once, or one by one if at once takes too long.

    At once, two open ranges take 16 times the example's time: a third of the CPU time that BERT was compiled
    for.
    """
    least, most = _least_and_most(lowered, sizes_of_example)
    if len(most) == 1 or _bytes_at(lowered, most) <= _AT_ONCE_BYTES:
        return [least, most]
    one_by_one = [{**sizes_of_example, symbol: size} for symbol, size in most.items()]
    return [least, *(sizes for sizes in one_by_one if sizes != sizes_of_example)]


def _least_and_most(lowered: Lowered, given: dict[sympy.Symbol, int]) -> list[dict[sympy.Symbol, int]]:
    return [{s: _bound(lowered, s, size, largest) for s, size in given.items()} for largest in (False, True)]


def between(lowered: Lowered, example: Sequence[Any], count: int) -> list[list[Any]]:
    """The example at `count` sizes between the smallest and the largest; empty if no size varies."""
    sizes_of_example = _varying(lowered, example)
    if not sizes_of_example:
        return []
    ends = _least_and_most(lowered, sizes_of_example)
    least, most = (_affordable(lowered, sizes_of_example, sizes) for sizes in ends)
    steps = [
        {symbol: low + (most[symbol] - low) * step // (count + 1) for symbol, low in least.items()}
        for step in range(1, count + 1)
    ]
    inputs = [_allowed(lowered, example, sizes_of_example, sizes) for sizes in steps]
    return [one for one in inputs if one is not None]


def _varying(lowered: Lowered, example: Sequence[Any]) -> dict[sympy.Symbol, int]:
    """The sizes that vary, with their values in the example."""
    nodes = [node for node in lowered.module.graph.nodes if node.op == "placeholder"]
    sizes: dict[sympy.Symbol, int] = {}
    for node, value in zip(nodes, example, strict=True):
        shape = _shape(node.meta.get("val"))
        for size, number in zip(shape or (), value.shape if shape else (), strict=True):
            if isinstance(size, sympy.Symbol):
                sizes.setdefault(size, int(number))
    return sizes


def _affordable(
    lowered: Lowered, given: dict[sympy.Symbol, int], ends: dict[sympy.Symbol, int]
) -> dict[sympy.Symbol, int]:
    """The ends, moved halfway towards the example until the graph's values fit in memory."""
    sizes = ends
    while _bytes_at(lowered, sizes) > MOST_BYTES and sizes != given:
        sizes = {symbol: given[symbol] + (size - given[symbol]) // 2 for symbol, size in sizes.items()}
    return sizes


def _bytes_at(lowered: Lowered, sizes: dict[sympy.Symbol, int]) -> int:
    """The bytes of all values of the graph at these sizes."""
    total = 0
    numbers: dict[Any, int] = {}  # a graph has few different sizes, and sympy takes long for each
    for node in lowered.module.graph.nodes:
        value = node.meta.get("val")
        shape = _shape(value)
        if shape is None or node.op == "get_attr" or node.op == "output":
            continue
        for size in shape:
            if size not in numbers:
                numbers[size] = _at(size, sizes)
        total += math.prod(numbers[size] for size in shape) * value.element_size()
    return total


def _at(size: Any, sizes: dict[sympy.Symbol, int]) -> int:
    """The value of a size where the varying sizes are these; 1 if it has none, as for a step of 0 rows."""
    try:
        number = size if isinstance(size, int) else size.subs(sizes)
    except ZeroDivisionError:
        return 1
    return int(number) if isinstance(number, int) or (number.is_number and number.is_finite) else 1


def _allowed(
    lowered: Lowered, example: Sequence[Any], given: dict[sympy.Symbol, int], ends: dict[sympy.Symbol, int]
) -> list[Any] | None:
    """The inputs at the ends, or as near to them as the guards allow; None if none of the tried ones is."""
    places = {item.name: slot for slot, item in enumerate(lowered.inputs)}
    guards = read_guards(lowered.guards, places)
    for step in range(_NEIGHBOURS):
        sizes = {symbol: _towards(size, given[symbol], step) for symbol, size in ends.items()}
        inputs = at_sizes(lowered, example, sizes)
        if all(holds(guard, inputs) for guard in guards):
            return inputs
        if sizes == given:
            return None
    return None


def _towards(size: int, goal: int, step: int) -> int:
    return max(size - step, goal) if size >= goal else min(size + step, goal)


def _untried(ends: dict[sympy.Symbol, int], sizes: dict[sympy.Symbol, int], lowered: Lowered) -> str:
    intended = ", ".join(map(str, ends.values()))
    tried = ", ".join(map(str, sizes.values()))
    need = _bytes_at(lowered, ends) / (1 << 30)
    return f"verified at sizes up to {tried}, not {intended}, where the values would take {need:.3g} GiB"


def at_sizes(lowered: Lowered, example: Sequence[Any], sizes: dict[sympy.Symbol, int]) -> list[Any]:
    """The example with these sizes; other sizes do not change."""
    nodes = [node for node in lowered.module.graph.nodes if node.op == "placeholder"]
    all_sizes = _varying(lowered, example) | sizes
    shapes = [_shape(node.meta.get("val")) for node in nodes]
    return [_resized(x, shape, all_sizes) for x, shape in zip(example, shapes, strict=True)]


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
    if allowed.upper.is_number and allowed.upper < 2**31:
        return int(allowed.upper)
    return max(given, int(allowed.lower), 1) * STRETCH


def _resized(value: Any, shape: tuple[Any, ...] | None, sizes: dict[sympy.Symbol, int]) -> Any:
    if shape is None:
        return value
    is_sorted = _is_sorted_line(value)
    for axis, size in enumerate(shape):
        wanted = size if isinstance(size, int) else int(size.subs(sizes))
        current = value.shape[axis]
        if wanted == current:
            continue
        if current == 0:
            value = value.new_zeros((*value.shape[:axis], wanted, *value.shape[axis + 1 :]))
        else:
            value = value.index_select(axis, torch.arange(wanted, device=value.device) % current)
    return value.sort().values if is_sorted else value


def _is_sorted_line(value: torch.Tensor) -> bool:
    """Whether these may be offsets. `embedding_bag` returns uninitialized memory if they are not sorted."""
    is_integer = not (value.is_floating_point() or value.is_complex())
    return value.dim() == 1 and is_integer and bool((value[1:] >= value[:-1]).all())
