"""Small functions as graphs of ATen operators, the way export makes them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tests.convert import drivers
from tests.functions import Function
from torch import fx
from torch.export import Dim, export

from intarsia.convert import convert, registry
from intarsia.convert.evaluators import EVALUATORS
from intarsia.errors import GuardError
from intarsia.lower import lower
from intarsia.network import Network


def lowered_program(
    function: Callable[..., Any], *inputs: torch.Tensor, dynamic: tuple[dict[int, Dim], ...]
) -> fx.GraphModule:
    """The graph as compiling sees it: decomposed where it must be, passes run."""
    exported = export(Function(function), inputs, dynamic_shapes=(dynamic,), strict=False)
    return lower(exported, registry.__contains__).module


def program_of(
    function: Callable[..., Any], *inputs: torch.Tensor, dynamic: tuple[dict[int, Dim], ...] | None = None
) -> fx.GraphModule:
    """The graph of a function of tensors; tensors it closes over are frozen."""
    shapes = None if dynamic is None else (tuple(d or None for d in dynamic),)
    exported = export(Function(function), inputs, dynamic_shapes=shapes, strict=False)
    if any(_is_taken_apart(node) for node in exported.graph.nodes):
        return lower(exported, registry.__contains__).module
    module = exported.module()
    graph = fx.Graph()
    values: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if _is_guard(node):
            continue
        if node.op == "output":
            values[node] = graph.output(
                [values[n] for n in node.all_input_nodes] if node.all_input_nodes else []
            )
            continue
        values[node] = graph.node_copy(node, values.__getitem__)
    made = fx.GraphModule(module, graph)
    made.graph.eliminate_dead_code()
    made.recompile()
    return made


def _is_taken_apart(node: fx.Node) -> bool:
    known = node.target in registry or node.target in EVALUATORS or _is_guard(node)
    return isinstance(node.target, torch._ops.OpOverload) and not known


def _is_guard(node: fx.Node) -> bool:
    # export checks its inputs in a submodule of its own and asserts on sizes: neither computes anything.
    if node.op == "call_module":
        return True
    return node.op == "call_function" and "assert" in str(node.target)


# One operator as a graph: converted, built, run, and compared with eager.


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


# A function of tensors, converted once, answers as eager does on every engine and at every shape.


Inputs = Sequence[torch.Tensor]


def assert_equal(
    function: Callable[..., Any],
    *calls: Inputs,
    dynamic: tuple[Any, ...] | None = None,
    engines: Sequence[str] = drivers.ENGINES,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    left: Sequence[str] = (),
) -> Network:
    """Convert at the first call's shapes, run every call; the network, for a look at its layers.

    The engines in `left` may leave a call to PyTorch by a guard.
    """
    with torch.no_grad():
        module = program_of(function, *calls[0], dynamic=dynamic)
    net = convert(module)
    for engine in engines:
        program = drivers.build(engine, net)
        for inputs in calls:
            with torch.no_grad():
                wanted = function(*inputs)
            wanted = wanted if isinstance(wanted, tuple | list) else (wanted,)
            try:
                made = program(*inputs)
            except GuardError:
                assert engine in left
                continue
            assert len(made) == len(wanted)
            for have, want in zip(made, wanted, strict=True):
                assert have.dtype == want.dtype and have.shape == want.shape, engine
                torch.testing.assert_close(have, want, rtol=rtol, atol=atol, equal_nan=True, msg=None)
    return net


def kinds(net: Network) -> list[str]:
    """The operators of a network, in order."""
    return [layer.kind for layer in net.get_layers()]
