"""How results lie in memory: views of inputs or of other results, and orders of axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from intarsia.errors import ArchiveError
from intarsia.lower import Lowered
from intarsia.lower.output_layouts import Order
from intarsia.lower.output_views import OutputView
from intarsia.runtime.archive.values import Json


def results_to_json(lowered: Lowered, write_graph: Callable[[fx.GraphModule], Json]) -> Json:
    """For each result of the user's, how it is a view, and the order of its axes."""

    def view_to_json(view: OutputView | None) -> Json:
        if view is None or view.held:  # who loads a file has no model, whose weights it would be a view of
            return None
        return {"graph": write_graph(view.views), "reads": list(view.reads), "of": list(view.of)}

    return {
        "views": [view_to_json(view) for view in lowered.views],
        "orders": [None if order is None else list(order) for order in lowered.layouts],
    }


def views_from_json(
    found: Sequence[Json], inputs: int, read_graph: Callable[[Json], fx.GraphModule]
) -> tuple[OutputView | None, ...]:
    """The views, which read no input or result that there is not, and no view."""

    def view_from_json(view: Json) -> OutputView | None:
        if view is None:
            return None
        reads, of = tuple(map(_place, view["reads"])), tuple(map(_place, view["of"]))
        if any(place >= inputs for place in reads) or any(found[place] is not None for place in of):
            raise ArchiveError(f"a result is a view of inputs {reads} and results {of}, which are none")
        return OutputView(read_graph(view["graph"]), reads, of)

    return tuple(map(view_from_json, found))


def orders_from_json(found: Sequence[Json]) -> tuple[Order | None, ...]:
    """The orders, each of which names every axis once."""
    orders = [None if order is None else tuple(map(_place, order)) for order in found]
    for order in orders:
        if order is not None and sorted(order) != list(range(len(order))):
            raise ArchiveError(f"a result has its axes in the order {order}, which is none")
    return tuple(orders)


def _place(found: Json) -> int:
    if type(found) is not int or found < 0:
        raise ArchiveError(f"{found!r} is no place among inputs, results or axes")
    return found
