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
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from intarsia.lower.output_views import returned_by

Order = tuple[int, ...]  # the axes of a tensor from the one whose steps are longest to the shortest
_LAST: dict[int, Order] = {4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}  # of images, by their dimensions


@dataclass(frozen=True)
class Layouts:
    """The order of each result of the user's, None where it is not known; and which inputs had channels last.

    `images` has the inputs that may, by their places in the flat call, and whether they did. Convolutions
    follow them: `others` are the orders of a call whose images are all laid out the other way.
    """

    orders: tuple[Order | None, ...] = ()
    images: tuple[tuple[int, bool], ...] = ()
    others: tuple[Order | None, ...] = ()

    def follow(self, flat: Sequence[Any]) -> bool | None:
        """Whether the images of a call are laid out as those of the example; None where only some are."""
        alike = {has_channels_last(flat[place]) == last for place, last in self.images}
        return None if len(alike) > 1 else alike != {False}


IN_ROWS = Layouts()


def output_layouts(program: ExportedProgram) -> Layouts:
    """How the results of a captured program lie."""
    results = returned_by(program)
    orders = tuple(layout_of(getattr(item, "meta", {}).get("val")) for item in results)
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    inputs = [node for node in nodes if kinds[node.name] is InputKind.USER_INPUT]
    images = {n: node for n, node in enumerate(inputs) if _is_image(node.meta.get("val"))}
    has_images = images and any(order is not None and len(order) in _LAST for order in orders)
    others = _orders_of_others(program, results, set(images.values())) if has_images else ()
    return Layouts(orders, tuple((n, has_channels_last(x.meta["val"])) for n, x in images.items()), others)


def _orders_of_others(
    program: ExportedProgram, results: Sequence[Any], images: set[fx.Node]
) -> tuple[Order | None, ...]:
    """The orders of the results where images come in the other layout: the graph runs on sizes alone."""
    graph = fx.Interpreter(program.graph_module, garbage_collect_values=False)
    try:
        with FakeTensorMode(), torch.no_grad():
            placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
            graph.run(*(_sized(node.meta.get("val"), node in images) for node in placeholders))
        return tuple(layout_of(graph.env.get(item)) for item in results)
    except Exception:  # an operator that needs values: such calls get their images as they are made
        return ()


def _sized(value: Any, is_turned: bool) -> Any:
    """A tensor of the same sizes without values, or a number; `is_turned`, an image in the other layout."""
    if isinstance(value, torch.SymInt):
        return _hint(value)
    if not isinstance(value, torch.Tensor):
        return value
    sizes, steps = ([_hint(n) for n in numbers] for numbers in (value.shape, value.stride()))
    tensor = torch.empty_strided(sizes, steps, dtype=value.dtype, device=value.device)
    if not is_turned:
        return tensor
    return laid_out(tensor, tuple(range(len(sizes))) if has_channels_last(value) else _LAST[len(sizes)])


def _is_image(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() in _LAST


def has_channels_last(value: Any) -> bool:
    """Whether an image is laid out by channels last, and not by rows.

    >>> has_channels_last(torch.empty(2, 3, 4, 4, memory_format=torch.channels_last))
    True
    """
    return _is_image(value) and layout_of(value) == _LAST[value.dim()]


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
