"""How results lie in memory in the model: in rows, or as images in channels_last and transposes do.

Engines hand out rows after rows. Who calls `view` on a result, or asks for its strides, must meet those that
PyTorch gives it: what works on the model's result works on ours.

It costs a copy of such a result. In the zoo that is ConvNeXt's alone, 150 kB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from intarsia.lower.output_views import returned_by

Order = tuple[int, ...]  # the axes of a tensor from the one whose steps are longest to the shortest
_LAST: dict[int, Order] = {4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}  # of images, by their dimensions


@dataclass(frozen=True)
class Layouts:
    """The order of each result of the user's, None where it is not known; and which inputs had channels last.

    `images` has the inputs that may, by their places in the flat call, and whether they did. Convolutions
    follow them: a call with images laid out otherwise gets images as they are made.
    """

    orders: tuple[Order | None, ...] = ()
    images: tuple[tuple[int, bool], ...] = ()

    def follow(self, flat: Sequence[Any]) -> bool:
        """Whether the images of a call are laid out as those of the example."""
        return all(has_channels_last(flat[place]) == last for place, last in self.images)


IN_ROWS = Layouts()


def output_layouts(program: ExportedProgram) -> Layouts:
    """How the results of a captured program lie."""
    orders = [layout_of(getattr(item, "meta", {}).get("val")) for item in returned_by(program)]
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    given = [node.meta.get("val") for node in nodes if kinds[node.name] is InputKind.USER_INPUT]
    images = [(n, x) for n, x in enumerate(given) if isinstance(x, torch.Tensor) and x.dim() in _LAST]
    return Layouts(tuple(orders), tuple((n, has_channels_last(x)) for n, x in images))


def has_channels_last(value: Any) -> bool:
    """Whether an image is laid out by channels last, and not by rows.

    >>> has_channels_last(torch.empty(2, 3, 4, 4, memory_format=torch.channels_last))
    True
    """
    is_image = isinstance(value, torch.Tensor) and value.dim() in _LAST
    return is_image and layout_of(value) == _LAST[value.dim()]


def layout_of(value: Any) -> Order | None:
    """The order in which a tensor's axes lie in memory; None where it lies there many times, or is empty.

    Of sizes that vary the order is that of the example. Axes of one element come where rows would have them.

    >>> layout_of(torch.empty(2, 3, 4, 4, memory_format=torch.channels_last))
    (0, 2, 3, 1)
    >>> rows = torch.empty(2, 3)
    >>> layout_of(rows.t()), layout_of(rows), layout_of(rows[:, :1].expand(2, 4))
    ((1, 0), (0, 1), None)
    """
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    sizes, steps = ([_hint(n) for n in told] for told in (value.shape, value.stride()))
    if 0 in sizes:  # it is empty, or how large it is is not known
        return None
    wide = sorted((axis for axis, size in enumerate(sizes) if size > 1), key=lambda axis: -steps[axis])
    reach = 1
    for axis in reversed(wide):
        if steps[axis] < reach:
            return None
        reach = steps[axis] * sizes[axis]
    if wide == sorted(wide):
        return tuple(range(len(sizes)))
    alone = [axis for axis, size in enumerate(sizes) if size == 1]
    return (*alone, *wide)


def laid_out(value: Any, order: Order) -> Any:
    """The same numbers with their axes in this order in memory.

    >>> laid_out(torch.ones(2, 3), (1, 0)).stride()
    (1, 2)
    """
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    if is_rows(order):
        return value.contiguous()
    rows = value.permute(order)
    return value if rows.is_contiguous() else rows.contiguous().permute(_inverse(order))


def is_rows(order: Order) -> bool:
    """Whether an order is the usual one, row by row."""
    return order == tuple(range(len(order)))


def _inverse(order: Sequence[int]) -> Order:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _hint(size: int | torch.SymInt) -> int:
    """A size, or that of the example; 0 where nobody knows it before the model runs."""
    hint = size.node.hint if isinstance(size, torch.SymInt) else size
    return hint if isinstance(hint, int) else 0
