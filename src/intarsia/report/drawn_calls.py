"""Generated calls of a model: random values like those of the example, and edge values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from intarsia.capture.example import Call

Fill = Callable[[torch.Tensor], torch.Tensor]


def drawn_calls(call: Call, count: int) -> Iterator[tuple[str, Call]]:
    """Calls with random values: floats with the example's mean and deviation, integers in its range."""
    for number in range(count):
        draw = torch.Generator().manual_seed(number)
        yield f"drawn inputs {number}", _filled(call, partial(_drawn, draw=draw))


def edge_calls(call: Call) -> Iterator[tuple[str, Call]]:
    """Calls with edge values: zeros, small and large numbers, one infinity or NaN, the ends of integers."""
    for name, fill in _EDGES.items():
        edge = _filled(call, fill)
        if not _same(edge, call):
            yield name, edge


def _drawn(value: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    if value.numel() == 0:
        return value
    if value.dtype is torch.bool:
        return torch.rand(value.shape, generator=draw) < float(value.float().mean())
    if value.dtype.is_floating_point:
        wide = value.float()
        spread = float(wide.std(correction=0))
        return torch.randn(value.shape, generator=draw) * spread + float(wide.mean())
    if value.dtype.is_complex:
        return value[torch.randperm(len(value), generator=draw)] if value.dim() else value
    return torch.randint(int(value.min()), int(value.max()) + 1, value.shape, generator=draw)


def _one(special: float) -> Fill:
    def fill(value: torch.Tensor) -> torch.Tensor:
        if not value.dtype.is_floating_point or not value.numel():
            return value
        changed = value.clone(memory_format=torch.contiguous_format)
        changed.view(-1)[0] = special
        return changed

    return fill


def _scaled(factor: float) -> Fill:
    return lambda value: value * factor if value.dtype.is_floating_point else value


def _end(largest: bool) -> Fill:
    def fill(value: torch.Tensor) -> torch.Tensor:
        is_integer = not (
            value.dtype.is_floating_point or value.dtype.is_complex or value.dtype is torch.bool
        )
        if not is_integer or not value.numel():
            return value
        return torch.full_like(value, int(value.max() if largest else value.min()))

    return fill


_EDGES: dict[str, Fill] = {
    "zeros": _scaled(0.0),
    "values 1e-4 times as large": _scaled(1e-4),
    "values 1e4 times as large": _scaled(1e4),
    "an infinity": _one(math.inf),
    "a NaN": _one(math.nan),
    "the least integer everywhere": _end(largest=False),
    "the largest integer everywhere": _end(largest=True),
}


def _filled(call: Call, fill: Fill) -> Call:
    """The call with other values; strides, dtypes and devices stay."""

    def replaced(value: torch.Tensor) -> torch.Tensor:
        if value.layout is not torch.strided:
            return value
        return torch.empty_like(value).copy_(fill(value.detach()))

    args, kwargs = pytree.tree_map_only(torch.Tensor, replaced, (tuple(call[0]), dict(call[1])))
    return args, kwargs


def _same(one: Call, other: Call) -> bool:
    def leaves(call: Call) -> list[Any]:
        values = pytree.tree_leaves((tuple(call[0]), dict(call[1])))
        return [value for value in values if isinstance(value, torch.Tensor)]

    return all(torch.equal(a, b) for a, b in zip(leaves(one), leaves(other), strict=True))
