"""A graph compiled for one set of weights, and whether a call brings the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import fx

from intarsia.backend.frozen import Autocast, Frozen, without_autocast
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.freshness import Freshness, Weight

NOTE = (
    "it needs gradients, which compiled modules do not give; call it under torch.no_grad(), or, if it is not"
    " trained, set requires_grad_(False) on it"
)


def needs_gradients(module: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether a result of the graph, or something it changes, carries gradients back to an input.

    A graph of frozen weights and plain inputs does not, whatever the grad mode is around it.
    """
    if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs):
        return False
    switched_on = any(
        node.target is torch._C._set_grad_enabled and node.args == (True,) for node in module.graph.nodes
    )
    if not torch.is_grad_enabled() and not switched_on:
        return False
    output = next(iter(reversed(module.graph.nodes)))
    results = [*output.all_input_nodes, *(node for node in module.graph.nodes if _writes(node))]
    values = [node.meta.get("example_value") for node in results]
    return any(value is None or getattr(value, "requires_grad", False) for value in values)


def _writes(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name in ("setitem", "iadd", "imul", "isub")
    return node.op in ("call_method", "call_function") and (in_place or "out" in node.kwargs)


@dataclass(frozen=True, eq=False)
class Program:
    """A compiled graph, and the weights it holds. That they are the same tensors is looked at before a call;
    whether they were written to, the compiled module itself looks, which raises StaleWeightsError.
    """

    compiled: Callable[..., Any]
    frozen: Frozen
    autocast: Autocast
    weights_of: Callable[[Sequence[Any]], tuple[Any, ...]]
    weights: Freshness  # which drops the program with its weights

    def fits(self, args: Sequence[Any]) -> bool:
        """Whether these are the weights and settings it was compiled with."""
        return self.weights.holds(self.weights_of(args)) and all(
            args[i].item() == number for i, number in self.frozen.settings
        )

    def changed(self, args: Sequence[Any]) -> list[int]:
        """Which of the call's inputs are weights that it was not compiled with, or that were written to."""
        return [self.frozen.weights[place] for place in self.weights.changed(self.weights_of(args))]

    def __call__(self, args: Sequence[Any]) -> Any:
        taken = [args[i] for i in self.frozen.taken]
        if self.autocast:
            with without_autocast(self.autocast):
                answer = self.compiled(*taken)
        else:
            answer = self.compiled(*taken)
        return (answer,) if self.frozen.single else answer


def program_of(
    compiled: Compiled,
    frozen: Frozen,
    autocast: Autocast,
    args: Sequence[Any],
    drop: Callable[[], Callable[[Program], None] | None],
) -> Program:
    """A program. When one of its weights is gone, what `drop` gives is called with it."""
    weights_of = picker(frozen.weights)
    programs: list[weakref.ref[Program]] = []

    def gone(_: object) -> None:
        forget, program = drop(), programs[0]() if programs else None
        if forget is not None and program is not None:
            forget(program)

    weights = Freshness([Weight("", weight) for weight in weights_of(args)], gone=gone)
    program = Program(compiled, frozen, autocast, weights_of, weights)
    programs.append(weakref.ref(program))
    return program


def picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that picks these places of a call, at the speed of C.

    >>> picker([2])("abc"), picker([])("abc"), picker([0, 2])("abc")
    (('c',), (), ('a', 'c'))
    """
    if len(places) > 1:
        return itemgetter(*places)
    return lambda args: tuple(args[i] for i in places)
