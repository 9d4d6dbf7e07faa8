"""How results lie in memory: views of inputs or of other results, and orders of axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from intarsia.archive.values import Json
from intarsia.errors import ArchiveError
from intarsia.lower import Lowered
from intarsia.lower.output_layouts import Layouts
from intarsia.lower.output_views import OutputView


def results_to_json(lowered: Lowered, write_graph: Callable[[fx.GraphModule], Json]) -> Json:
    """For each result of the user's, how it is a view, and the order of its axes."""

    def view_to_json(view: OutputView | None) -> Json:
        if view is None or view.held:  # who loads a file has no model, whose weights it would be a view of
            return None
        return {"graph": write_graph(view.views), "reads": list(view.reads), "of": list(view.of)}

    layouts = lowered.layouts
    return {
        "views": [view_to_json(view) for view in lowered.views],
        "orders": [None if order is None else list(order) for order in layouts.orders],
        "images": [[place, last] for place, last in layouts.images],
        "others": [None if order is None else list(order) for order in layouts.others],
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


def layouts_from_json(found: Mapping[str, Any], inputs: int) -> Layouts:
    """The orders, each of which names every axis once, and which inputs had channels last."""
    orders, others = (
        [None if order is None else tuple(map(_place, order)) for order in listed]
        for listed in (found["orders"], found.get("others", ()))  # files of old have no others
    )
    for order in (*orders, *others):
        if order is not None and sorted(order) != list(range(len(order))):
            raise ArchiveError(f"a result has its axes in the order {order}, which is none")
    images = [(_place(place), bool(last)) for place, last in found["images"]]
    if strange := [place for place, _ in images if place >= inputs]:
        raise ArchiveError(f"results follow input {strange[0]}, and there are {inputs}")
    return Layouts(tuple(orders), tuple(images), tuple(others))


def _place(found: Json) -> int:
    if type(found) is not int or found < 0:
        raise ArchiveError(f"{found!r} is not a place among inputs, results or axes")
    return found
