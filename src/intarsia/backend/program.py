"""Dynamo's graph with its weights as constants, and the program that is compiled from it.

Dynamo passes parameters as inputs, and engines are far slower with weights that they cannot pack.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import fx, nn

from intarsia.backend.dynamo_graph import DynamoInput, Kind, plain_number, settled
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.freshness import Freshness, Weight

Autocast = tuple[tuple[str, torch.dtype], ...]  # device types under autocast, and the dtype of each


@dataclass(frozen=True)
class Frozen:
    """A module to compile, and how Dynamo's call maps to it.

    `weights` are the places of Dynamo's inputs that are constants of it, `taken` of those that are its
    inputs, and `settings` of numbers that are constants, with their values. With `single`, it returns its one
    result by itself, not in a tuple.
    """

    module: nn.Module
    weights: tuple[int, ...]
    taken: tuple[int, ...]
    dynamic_shapes: tuple[Any, ...] | None
    single: bool
    settings: tuple[tuple[int, float], ...]


def freeze(
    module: fx.GraphModule,
    kinds: Sequence[DynamoInput],
    inputs: Sequence[Any],
    live: frozenset[int],
    autocast: Autocast,
) -> Frozen:
    """The graph with the weights among `inputs` as constants, except those that are `live`.

    A size is read from its tensor, so that no number has to be passed. The autocast around the call becomes
    part of the module.
    """
    frozen = fx.GraphModule(module, copy.deepcopy(module.graph))
    nodes = [node for node in frozen.graph.nodes if node.op == "placeholder"]
    settings = _write_settings(frozen.graph, nodes, kinds, inputs)
    weights = [i for i, item in enumerate(kinds) if item.kind is Kind.WEIGHT and i not in live]
    first = next(node for node in frozen.graph.nodes if node.op != "placeholder")
    with frozen.graph.inserting_before(first):
        for i in weights:
            name = f"weight_{i}"
            frozen.register_buffer(name, inputs[i].detach())
            _replace(frozen.graph, nodes[i], frozen.graph.get_attr(name))
        read = [i for i, item in enumerate(kinds) if item.kind is Kind.SIZE and nodes[i].users]
        for i, item in ((i, kinds[i]) for i in read):
            size = frozen.graph.call_function(torch.ops.aten.sym_size.int, (nodes[item.tensor], item.axis))
            _replace(frozen.graph, nodes[i], size)
    taken = []
    for i, node in enumerate(nodes):
        if i in weights or i in read:
            continue
        if not node.users and kinds[i].kind is not Kind.TENSOR:
            frozen.graph.erase_node(node)
        else:
            taken.append(i)
    single = _unwrap(frozen.graph)
    frozen.graph.lint()
    frozen.recompile()
    for node in frozen.graph.nodes:
        node.meta.pop("example_value", None)  # it has Dynamo's own symbols, which mean nothing here
    dims: tuple[Any, ...] | None = tuple(kinds[i].dims for i in taken)
    dims = dims if any(dims or ()) else None
    if not autocast:
        return Frozen(frozen, tuple(weights), tuple(taken), dims, single, settings)
    # `forward(*args)` has one parameter, which contains all arguments.
    shapes = None if dims is None else (dims,)
    return Frozen(_Within(frozen, autocast), tuple(weights), tuple(taken), shapes, single, settings)


def _write_settings(
    graph: fx.Graph, nodes: Sequence[fx.Node], kinds: Sequence[DynamoInput], inputs: Sequence[Any]
) -> tuple[tuple[int, float], ...]:
    """Make numbers of modules constants; returns those that Dynamo does not guard, with their values."""
    unguarded = []
    for i, item in enumerate(kinds):
        if item.kind is not Kind.SETTING:
            continue
        reads = [node for node in nodes[i].users if node.op == "call_method" and node.target == "item"]
        number = inputs[i].item()
        if not all(map(settled, reads)):
            unguarded.append((i, number))
        for node in reads:
            node.replace_all_uses_with(number)
            graph.erase_node(node)
    return tuple(unguarded)


def example_of(frozen: Frozen, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments of the frozen module for a call of Dynamo's graph; numbers have their present values."""
    values = [plain_number(inputs[i]) for i in frozen.taken]
    return tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in values)


def autocast_now() -> Autocast:
    """The autocast of the caller."""
    kinds = ("cpu", "cuda")
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind))


def without_autocast(autocast: Autocast) -> AbstractContextManager[Any]:
    """A context without autocast, for a module that enters autocast itself."""
    stack = ExitStack()
    for kind, dtype in autocast:
        stack.enter_context(torch.autocast(kind, dtype, enabled=False))
    return stack


class _Within(nn.Module):
    """A graph under the autocast of its caller."""

    def __init__(self, graph: fx.GraphModule, autocast: Autocast) -> None:
        super().__init__()
        self.graph_module, self.autocast = graph, autocast

    def forward(self, *args: Any) -> Any:
        with ExitStack() as stack:
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype))
            return self.graph_module(*args)


def _replace(graph: fx.Graph, old: fx.Node, new: fx.Node) -> None:
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)
    graph.erase_node(old)


def _unwrap(graph: fx.Graph) -> bool:
    """Make the graph return a single result by itself, which is faster; whether it has one."""
    output = graph.output_node()
    results = output.args[0]
    if not isinstance(results, list | tuple) or len(results) != 1 or not isinstance(results[0], fx.Node):
        return False
    output.args = (results[0],)
    return True


NOTE = (
    "it needs gradients, which compiled modules do not have; call it under torch.no_grad() or, if it is not"
    " trained, set requires_grad_(False) on it"
)


def needs_gradients(module: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether gradients flow from a result of the graph, or from what it changes, to an input.

    They do not in a graph of frozen weights and inputs without gradients, in any grad mode.
    """
    if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs):
        return False
    switched_on = any(
        node.target is torch._C._set_grad_enabled and node.args == (True,) for node in module.graph.nodes
    )
    if not torch.is_grad_enabled() and not switched_on:
        return False
    output = module.graph.output_node()
    results = [*output.all_input_nodes, *(node for node in module.graph.nodes if _writes(node))]
    values = [node.meta.get("example_value") for node in results]
    return any(value is None or getattr(value, "requires_grad", False) for value in values)


def _writes(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name in ("setitem", "iadd", "imul", "isub")
    return node.op in ("call_method", "call_function") and (in_place or "out" in node.kwargs)


class Program:
    """A compiled graph and its weights.

    `fits` checks before a call whether the weights are the same tensors. The compiled module checks whether
    they were written to, and raises StaleWeightsError. When a weight is freed, the function that `drop`
    returns is called with the program.
    """

    def __init__(
        self,
        compiled: Compiled,
        frozen: Frozen,
        autocast: Autocast,
        args: Sequence[Any],
        drop: Callable[[], Callable[[Program], None] | None],
    ) -> None:
        self.compiled: Compiled = compiled
        self.frozen: Frozen = frozen
        self.autocast: Autocast = autocast
        own = weakref.ref(self)

        def gone(_: object) -> None:
            forget, program = drop(), own()
            if forget is not None and program is not None:
                forget(program)

        self._weights_of = picker(frozen.weights)
        self._weights = Freshness([Weight("", weight) for weight in self._weights_of(args)], gone=gone)

    def fits(self, args: Sequence[Any]) -> bool:
        """Whether the weights and settings of a call are those it was compiled with."""
        return self._weights.holds(self._weights_of(args)) and all(
            args[i].item() == number for i, number in self.frozen.settings
        )

    def changed(self, args: Sequence[Any]) -> list[int]:
        """The inputs of a call that are other weights than those compiled, or were written to."""
        return [self.frozen.weights[place] for place in self._weights.changed(self._weights_of(args))]

    def __call__(self, args: Sequence[Any]) -> Any:
        taken = [args[i] for i in self.frozen.taken]
        if self.autocast:
            with without_autocast(self.autocast):
                answer = self.compiled(*taken)
        else:
            answer = self.compiled(*taken)
        return (answer,) if self.frozen.single else answer


def picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that selects these places of a call, which for several runs in C.

    >>> picker([2])("abc"), picker([])("abc"), picker([0, 2])("abc")
    (('c',), (), ('a', 'c'))
    """
    if len(places) > 1:
        return itemgetter(*places)
    return lambda args: tuple(args[i] for i in places)
