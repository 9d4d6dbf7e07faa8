"""The results of a call: in memory of their own, with the model's layouts and views; values written back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from intarsia.lower import Lowered, Role
from intarsia.lower.result_memory import Order, is_rows, laid_out
from intarsia.runtime.fallback import WithFallback
from intarsia.runtime.inlay import Assembly
from intarsia.runtime.ownership import Ownership, constants_of

_IMAGE = 4  # dimensions; results with as many may have the layout of the images in the call


class ResultPlan:
    """From the graph's results to those of the caller.

    Results that share memory are copied (`Ownership`). Results that are views of an input or of each other in
    the model become such views. Values of buffers and inputs that the model writes to are copied there.
    `is_single`: the graph has one result, which is returned unchanged.
    """

    def __init__(self, lowered: Lowered, assembly: Assembly) -> None:
        self._lowered = lowered
        users = iter(lowered.views)
        views = [next(users, None) if o.role is Role.USER else None for o in lowered.outputs]
        self._views = tuple((place, view) for place, view in enumerate(views) if view is not None)
        from_engines = _from_engines(lowered, assembly)
        self._layouts = ResultLayouts(lowered, views, from_engines)
        fresh = [
            output.role is not Role.USER
            or output.is_input
            or output.twin is not None
            or is_fresh
            or views[place] is not None
            for place, (output, is_fresh) in enumerate(zip(lowered.outputs, from_engines, strict=True))
        ]
        self._ownership = Ownership(constants_of(lowered.module), list(lowered.buffers.values()), fresh)
        index_of = {item.name: item.index for item in lowered.inputs}
        self._written = tuple(
            (output.target or "", index_of[output.target or ""] or 0)
            for output in lowered.outputs
            if output.role is Role.INPUT
        )
        self.writes: bool = any(output.role is not Role.USER for output in lowered.outputs)
        unchanged = not (self.writes or self._views or self._layouts) and all(fresh)
        self.is_single: Any | bool = lowered.out_spec.is_leaf() and unchanged

    def check_written(self, flat: Sequence[Any]) -> None:
        """InputError if an input that the model writes to shares memory with another one."""
        if self._written:
            self._ownership.check_written(
                [(name, flat[index]) for name, index in self._written],
                [(item.name, flat[item.index]) for item in self._lowered.inputs if item.index is not None],
            )

    def finish(self, flat: Sequence[Any], results: Sequence[Any]) -> Any:
        """Write back what the model changes, and return the caller's results."""
        if self.is_single:
            return results[0]
        owned = list(self._ownership.own(results, flat))
        if self._layouts:
            self._layouts.lay_out(owned, flat)
        returned: dict[int, Any] = {}
        indices = dict(self._written)
        with torch.no_grad():
            for place, (output, result) in enumerate(zip(self._lowered.outputs, owned, strict=True)):
                if output.role is Role.BUFFER:
                    self._lowered.buffers[output.target or ""].copy_(result)
                elif output.role is Role.INPUT:
                    flat[indices[output.target or ""]].copy_(result)
                else:
                    returned[place] = result if output.twin is None else returned[output.twin]
        if self._views:
            self._replay(flat, returned)
        return pytree.tree_unflatten(list(returned.values()), self._lowered.out_spec)

    def _replay(self, flat: Sequence[Any], returned: dict[int, Any]) -> None:
        """Replace results that are views in the model by views of the caller's tensors."""
        places = list(returned)
        for place, view in self._views:
            returned[place] = view(flat, [returned[p] for p in places])
        for place, output in enumerate(self._lowered.outputs):
            if output.role is Role.USER and output.twin is not None:
                returned[place] = returned[output.twin]


class ResultLayouts:
    """Gives results the model's memory layout, where engines or a graph without copies have another.

    Engines return contiguous rows, and views have the layout of their base. False if no result needs a check.
    """

    def __init__(self, lowered: Lowered, views: Sequence[Any], from_engines: Sequence[bool]) -> None:
        self._follow = lowered.layouts.follow

        def orders_of(listed: Sequence[Order | None]) -> list[tuple[int, Order]]:
            users = iter(listed)
            orders = [next(users, None) if o.role is Role.USER else None for o in lowered.outputs]
            return [
                (place, order)
                for place, (order, output) in enumerate(zip(orders, lowered.outputs, strict=True))
                if order is not None and views[place] is None and not output.is_input and output.twin is None
                if not from_engines[place] or not is_rows(order)
            ]

        self._orders, self._others = orders_of(lowered.layouts.orders), orders_of(lowered.layouts.others)
        self._has_images = any(len(order) >= _IMAGE for _, order in (*self._orders, *self._others))

    def __bool__(self) -> bool:
        return bool(self._orders or self._others)

    def lay_out(self, results: list[Any], flat: Sequence[Any]) -> None:
        """Change the layouts of a call's results to the model's, which follow the layout of the images."""
        follows = not self._has_images or self._follow(flat)
        for place, order in self._others if follows is False else self._orders:
            if follows is not None or len(order) < _IMAGE:
                results[place] = laid_out(results[place], order)


def _from_engines(lowered: Lowered, assembly: Assembly) -> list[bool]:
    """For each output of the graph, whether an engine computes it in memory of its own."""
    computed = {
        node
        for piece, program in zip(assembly.pieces, assembly.programs, strict=True)
        if isinstance(program, WithFallback) and program.fresh
        for node in piece.outputs
    }
    returned: Any = lowered.module.graph.output_node().args[0]
    # A value that is returned twice is fresh only the first time.
    return [
        not isinstance(item, fx.Node) or (item in computed and item not in returned[:place])
        for place, item in enumerate(returned)
    ]
