"""How results lie in memory in the model, where that is not row by row: images in channels_last, transposes.

Engines hand out rows after rows. Who calls `view` on a result, or asks for its strides, must meet those that
PyTorch gives it: what works on the model's result works on ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from intarsia.lower.output_views import returned_by

Order = tuple[int, ...]  # the axes of a tensor from the one whose steps are longest to the shortest


def output_layouts(program: ExportedProgram) -> tuple[Order | None, ...]:
    """For each result that the user gets, how it lies; None for the usual."""
    return tuple(layout_of(getattr(item, "meta", {}).get("val")) for item in returned_by(program))


def layout_of(value: Any) -> Order | None:
    """The order in which a tensor's axes lie, if it fills its memory in another than its own; else None.

    Of sizes that vary the order is that of the example.

    >>> layout_of(torch.empty(2, 3, 4, 4, memory_format=torch.channels_last))
    (0, 2, 3, 1)
    >>> rows = torch.empty(2, 3)
    >>> layout_of(rows.t()), layout_of(rows), layout_of(rows[:, :1].expand(2, 4))
    ((1, 0), None, None)
    """
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    sizes, steps = ([_hint(n) for n in told] for told in (value.shape, value.stride()))
    if 0 in sizes:  # it is empty, or how large it is is not known
        return None
    alone = [axis for axis, size in enumerate(sizes) if size == 1]  # whose steps say nothing
    wide = sorted((axis for axis, size in enumerate(sizes) if size > 1), key=lambda axis: -steps[axis])
    step = 1
    for axis in reversed(wide):
        if steps[axis] != step:
            return None  # a part of other memory, or the same memory many times
        step *= sizes[axis]
    return None if wide == sorted(wide) else (*alone, *wide)


def laid_out(value: Any, order: Order) -> Any:
    """The same numbers with their axes in this order in memory.

    >>> laid_out(torch.ones(2, 3), (1, 0)).stride()
    (1, 2)
    """
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    rows = value.permute(order)
    return value if rows.is_contiguous() else rows.contiguous().permute(_inverse(order))


def _inverse(order: Sequence[int]) -> Order:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _hint(size: int | torch.SymInt) -> int:
    """A size, or that of the example; 0 where nobody knows it before the model runs."""
    hint = size.node.hint if isinstance(size, torch.SymInt) else size
    return hint if isinstance(hint, int) else 0
