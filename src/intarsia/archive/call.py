"""The call of a compiled module: inputs with their checks, and results with their layouts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from intarsia.archive.codec import (
    Devices,
    Json,
    from_json,
    signature_to_json,
    spec_from_json,
    spec_to_json,
    to_json,
)
from intarsia.errors import ArchiveError
from intarsia.lower.lowered import GraphInput, GraphOutput, Lowered, Role
from intarsia.lower.result_memory import Layouts, OutputView
from intarsia.runtime.call_interface import Check, ConstantCheck, IntegerCheck, TensorCheck
from intarsia.runtime.compiled import Compiled

_FROM_TORCH = """FloorDiv ModularIndexing CleanDiv Mod PythonMod CeilToInt FloorToInt TruncToInt RoundToInt
 IntTrueDiv FloatTrueDiv PowByNatural ToFloat Max Min Where CeilDiv LShift RShift"""


@functools.cache
def _functions() -> dict[str, Any]:
    """The functions that may compute a size, by name. Nothing is evaluated as text."""
    import sympy  # takes long to import, and is needed only if sizes vary
    from torch.utils._sympy import functions as torch_sympy

    return {
        **{kind.__name__: kind for kind in (sympy.Add, sympy.Mul, sympy.Pow, sympy.floor, sympy.ceiling)},
        **{name: getattr(torch_sympy, name) for name in _FROM_TORCH.split() if hasattr(torch_sympy, name)},
    }


def call_to_json(compiled: Compiled, write_graph: Callable[[fx.GraphModule], Json]) -> Json:
    """Inputs, results, structures and the model's signature."""
    lowered = compiled.lowered
    inputs = [[i.name, i.index, i.buffer, to_json(i.constant), i.is_constant] for i in lowered.inputs]
    outputs = [
        [o.role.name, o.target, to_json(o.constant), o.is_constant, o.is_input, o.twin]
        for o in lowered.outputs
    ]
    return {
        "inputs": inputs,
        "outputs": outputs,
        "in_spec": spec_to_json(lowered.in_spec),
        "out_spec": spec_to_json(lowered.out_spec),
        "names": list(lowered.input_names),
        "ranges": ranges_to_json(lowered.range_constraints),
        "guards": list(lowered.guards),
        "checks": [check_to_json(check) for check in compiled.checks],
        "signature": signature_to_json(compiled.call_signature),
        "results": results_to_json(lowered, write_graph),
    }


def lowered_from_json(
    call: Json,
    module: fx.GraphModule,
    buffers: Mapping[str, torch.Tensor],
    read_graph: Callable[[Json], fx.GraphModule],
) -> Lowered:
    """The lowered graph with its inputs and results; checks and signature are read separately."""
    results, count = call["results"], len(call["checks"])
    return Lowered(
        module,
        tuple(_input(*item) for item in call["inputs"]),
        tuple(_output(*item) for item in call["outputs"]),
        spec_from_json(call["in_spec"]),
        spec_from_json(call["out_spec"]),
        dict(buffers),
        tuple(call["names"]),
        ranges_from_json(call["ranges"]),
        tuple(call["guards"]),
        views=views_from_json(results["views"], count, read_graph),
        layouts=layouts_from_json(results, count),
    )


def _input(name: str, index: int | None, buffer: str | None, constant: Json, is_constant: bool) -> GraphInput:
    return GraphInput(name, index, buffer, from_json(constant), is_constant)


def _output(
    role: str, target: str | None, constant: Json, is_constant: bool, is_input: bool, twin: int | None
) -> GraphOutput:
    return GraphOutput(Role[role], target, from_json(constant), is_constant, is_input, twin)


@dataclass(frozen=True)
class Range:
    """The smallest and the largest size of a dimension that varies."""

    lower: float
    upper: float


def size_to_json(size: Any) -> Json:
    """A size: a number, a symbol, or an expression of them."""
    if isinstance(size, int) or size.is_Integer:
        return int(size)
    if size.is_Symbol:
        return size.name
    if size.is_Rational:
        return ["/", int(size.p), int(size.q)]
    if type(size).__name__ not in _functions():
        raise ArchiveError(
            f"the size {size} is computed by {type(size).__name__}, which cannot be written there"
        )
    return [type(size).__name__, *(size_to_json(part) for part in size.args)]


def size_from_json(entry: Json) -> Any:
    """The size as a sympy expression; an integer stays one."""
    if isinstance(entry, int):
        return entry
    import sympy

    if isinstance(entry, str):
        return sympy.Symbol(entry, integer=True, positive=True)
    name, *parts = entry
    if name == "/":
        return sympy.Rational(*parts)
    return _functions()[name](*(sympy.sympify(size_from_json(part)) for part in parts))


def check_to_json(check: Check) -> Json:
    """The check of one input."""
    if isinstance(check, IntegerCheck):
        return {"name": check.name, "integer": check.example}
    if isinstance(check, ConstantCheck):
        return {"name": check.name, "constant": to_json(check.value)}
    return {
        "name": check.name,
        "dtype": to_json(check.dtype),
        "device": to_json(check.device),
        "shape": [size_to_json(size) for size in check.shape],
        "strides": None if check.strides is None else list(check.strides),
    }


def check_from_json(entry: Json, devices: Devices) -> Check:
    """The check of one input."""
    if "integer" in entry:
        return IntegerCheck(str(entry["name"]), int(entry["integer"]))
    if "constant" in entry:
        return ConstantCheck(entry["name"], from_json(entry["constant"], None, devices))
    shape = tuple(size_from_json(size) for size in entry["shape"])
    static = torch.Size(shape) if all(isinstance(size, int) for size in shape) else None
    strides = None if entry["strides"] is None else tuple(entry["strides"])
    dtype, device = (from_json(entry[key], None, devices) for key in ("dtype", "device"))
    return TensorCheck(entry["name"], dtype, device, shape, static, strides)


def ranges_to_json(ranges: Mapping[Any, Any]) -> Json:
    """Ranges by the names of symbols; None for an open end."""
    return {str(symbol): [_end(r.lower), _end(r.upper)] for symbol, r in ranges.items() if symbol.is_Symbol}


def _end(value: Any) -> int | None:
    return int(value) if isinstance(value, int) or value.is_Integer else None


def ranges_from_json(entry: Json) -> dict[Any, Range]:
    return {
        size_from_json(name): Range(
            -math.inf if low is None else int(low), math.inf if high is None else int(high)
        )
        for name, (low, high) in entry.items()
    }


def results_to_json(lowered: Lowered, write_graph: Callable[[fx.GraphModule], Json]) -> Json:
    """The views and layouts of the user's results."""

    def view_to_json(view: OutputView | None) -> Json:
        if view is None or view.held:  # a loaded module has no model whose weights could be returned
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
    entries: Sequence[Json], inputs: int, read_graph: Callable[[Json], fx.GraphModule]
) -> tuple[OutputView | None, ...]:
    """The views. ArchiveError for one that reads a missing input or result, or another view."""

    def view_from_json(view: Json) -> OutputView | None:
        if view is None:
            return None
        reads, of = tuple(map(_place, view["reads"])), tuple(map(_place, view["of"]))
        if any(place >= inputs for place in reads) or any(entries[place] is not None for place in of):
            raise ArchiveError(f"a result is a view of inputs {reads} and results {of}, which do not exist")
        return OutputView(read_graph(view["graph"]), reads, of)

    return tuple(map(view_from_json, entries))


def layouts_from_json(entry: Mapping[str, Any], inputs: int) -> Layouts:
    """The layouts. ArchiveError for an order that does not have every axis once, or a missing input."""
    orders, others = (
        [None if order is None else tuple(map(_place, order)) for order in listed]
        for listed in (entry["orders"], entry["others"])
    )
    for order in (*orders, *others):
        if order is not None and sorted(order) != list(range(len(order))):
            raise ArchiveError(f"a result has the order of axes {order}, which is invalid")
    images = [(_place(place), bool(last)) for place, last in entry["images"]]
    if strange := [place for place, _ in images if place >= inputs]:
        raise ArchiveError(f"results follow input {strange[0]}, and there are {inputs}")
    return Layouts(tuple(orders), tuple(images), tuple(others))


def _place(value: Json) -> int:
    if type(value) is not int or value < 0:
        raise ArchiveError(f"{value!r} is not the number of an input, a result or an axis")
    return value
