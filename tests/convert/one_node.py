"""One operator as a graph: converted, built, run, and compared with eager."""

from __future__ import annotations

import operator
from typing import Any

import torch
from tests.convert import drivers
from torch import fx
from torch.export import export

from intarsia.convert import convert, registry
from intarsia.errors import GuardError
from intarsia.lower import lower
from intarsia.network import Network


def graph_of(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> tuple[fx.GraphModule, list[torch.Tensor], torch.Tensor]:
    """The graph of one call, its inputs, and eager's (first) answer."""
    graph = fx.Graph()
    given: list[torch.Tensor] = []

    def place(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder(f"x{len(given)}")
        node.meta["val"] = value
        given.append(value)
        return node

    placed = tuple(place(arg) for arg in args)
    expected = target(*args, **(kwargs or {}))
    made = graph.call_function(target, placed, kwargs or {})
    made.meta["val"] = expected
    if isinstance(expected, list | tuple):
        expected = expected[0]
        made = graph.call_function(operator.getitem, (made, 0))
        made.meta["val"] = expected
    graph.output((made,))
    module = fx.GraphModule({}, graph)
    if target not in registry and isinstance(target, torch._ops.OpOverload):
        with torch.no_grad():  # lowering takes it apart
            module = lower(export(module, tuple(given), strict=False), registry.__contains__).module
    return module, given, expected


def network_of(target: Any, *args: Any, **kwargs: Any) -> Network:
    """What one call is converted to."""
    module, _, _ = graph_of(target, args, kwargs)
    return convert(module)


def answers(
    target: Any, *args: Any, engine: str = "onnxruntime", **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The engine's answer and eager's; a call the engine leaves to PyTorch is a GuardError."""
    module, given, expected = graph_of(target, args, kwargs)
    program = drivers.build(engine, convert(module))
    (answer,) = program(*(tensor.clone() for tensor in given))
    return answer, expected


def answers_of_both(
    target: Any, *args: Any, engine: str = "onnxruntime", **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as a user meets it: what the engine would answer wrongly, PyTorch answers."""
    try:
        return answers(target, *args, engine=engine, **kwargs)
    except GuardError:
        expected = target(*args, **kwargs)
        return expected, expected
