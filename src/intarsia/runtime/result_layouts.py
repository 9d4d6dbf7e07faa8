"""Results laid out as the model's, where engines, or a graph without copies, make them otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from intarsia.lower import Lowered, Role
from intarsia.lower.output_layouts import is_rows, laid_out

_IMAGE = 4  # dimensions; results of so many may follow how images are laid out


class ResultLayouts:
    """Lays out results; false where none needs a look.

    Engines make rows, and views lie as what they show.
    """

    def __init__(self, lowered: Lowered, views: Sequence[Any], engines_make: Sequence[bool]) -> None:
        self._follow = lowered.layouts.follow
        users = iter(lowered.layouts.orders)
        orders = [next(users, None) if o.role is Role.USER else None for o in lowered.outputs]
        self._orders = [
            (place, order)
            for place, (order, output) in enumerate(zip(orders, lowered.outputs, strict=True))
            if order is not None and views[place] is None and not output.is_input and output.twin is None
            if not engines_make[place] or not is_rows(order)
        ]
        self._has_images = any(len(order) >= _IMAGE for _, order in self._orders)

    def __bool__(self) -> bool:
        return bool(self._orders)

    def lay_out(self, results: list[Any], flat: Sequence[Any]) -> None:
        """Lay out the results of a call; images, only where the call's are laid out as the example's."""
        follows = not self._has_images or self._follow(flat)
        for place, order in self._orders:
            if follows or len(order) < _IMAGE:
                results[place] = laid_out(results[place], order)
