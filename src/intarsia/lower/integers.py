"""Integer arguments that may have any value, such as a timestep, because the graph uses them as numbers.

torch.export decides what varies: an integer that the model's Python code needs keeps the example's value. So
does one that becomes a size, an index or an option of an operator, which engines want as a constant.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from intarsia.capture.example import bound_arguments, device_kind
from intarsia.capture.size_guards import holds, read_guards
from intarsia.lower.lowered import Lowered

_TAKE_NUMBERS = {
    *("add", "sub", "rsub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge"),
    *("fill", "full", "full_like", "scalar_tensor"),
}
# Other values that are tried, the nearest first, since the range of an integer may be small.
_CHANGES: tuple[Callable[[int], int], ...] = (
    lambda n: n - 1,
    lambda n: n + 2,
    lambda n: 10 * n,
    lambda n: 1000 + n,
)
_ARITHMETIC = {
    *(operator.add, operator.sub, operator.mul, operator.neg, operator.floordiv, operator.mod),
    *(abs, operator.abs, torch.sym_max, torch.sym_min),
}


def plain_integers(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """The names of the arguments that are integers above 1; none on a GPU, whose graphs record values.

    0 and 1 are often flags, and export does not let a negative number vary.
    """
    values = _by_name(model, args, kwargs)
    names = [name for name, value in values.items() if type(value) is int and value > 1]
    return names if names and device_kind(model, args, kwargs) == "cpu" else []


def _by_name(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(model, nn.Module):
        return {}
    bound = bound_arguments(model, args, kwargs)
    if bound is None:
        return {}
    kinds = [bound.signature.parameters[name].kind for name in bound.arguments]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {} if any(kind in variadic for kind in kinds) else dict(bound.arguments)


def letting_vary(
    names: Sequence[str], model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The `dynamic_shapes` of a call in which these integers vary."""
    values = _by_name(model, args, kwargs)
    return {
        name: Dim.AUTO if name in names else pytree.tree_map(lambda _: None, value)
        for name, value in values.items()
    }


def used_as_numbers(program: ExportedProgram, names: Iterable[str]) -> list[str]:
    """Those of the integers that vary in a program of fixed sizes and are used as numbers alone."""
    if any(_symbols(node) for node in program.graph.nodes):
        return []
    specs = [spec for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    inputs = {spec.arg.name for spec in specs}
    nodes = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in inputs]
    numbers = [node for node in nodes if isinstance(node.meta.get("val"), torch.SymInt)]
    free = [node for node in numbers if node.meta["val"].node.expr.is_Symbol and _is_number(node)]
    if set(program.range_constraints) - {node.meta["val"].node.expr for node in free}:
        return []  # another symbol: a number from data, or an integer that is used as an index
    return [
        name for name in names if any(re.fullmatch(rf"{name.lower()}(_\d+)?", node.name) for node in free)
    ]


def _symbols(node: fx.Node) -> bool:
    """Whether a node has a tensor whose size varies."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return any(
        isinstance(leaf, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in leaf.shape)
        for leaf in leaves
    )


def _is_number(node: fx.Node) -> bool:
    """Whether all readers of an integer use it as a number."""
    for user in node.users:
        if user.target in _ARITHMETIC:
            if not _is_number(user):
                return False
            continue
        target = user.target
        if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
            return False
        if target.overloadpacket.__name__ not in _TAKE_NUMBERS or user.kwargs.get("alpha") is node:
            return False
    return True


def other_values(lowered: Lowered, example: Sequence[Any]) -> list[list[Any]]:
    """The example with other values of the integers that vary, as far as the graph's guards allow."""
    nodes = [node for node in lowered.module.graph.nodes if node.op == "placeholder"]
    places = [place for place, node in enumerate(nodes) if isinstance(node.meta.get("val"), torch.SymInt)]
    places = [place for place in places if type(example[place]) is int]
    if not places:
        return []
    guards = read_guards(lowered.guards, {item.name: place for place, item in enumerate(lowered.inputs)})
    calls = []
    for change in _CHANGES:
        call = [change(value) if place in places else value for place, value in enumerate(example)]
        if all(_is_in_range(lowered, nodes[p], call[p]) for p in places):
            calls += [call] if all(holds(guard, call) for guard in guards) else []
    return calls


def _is_in_range(lowered: Lowered, node: fx.Node, value: int) -> bool:
    allowed = lowered.range_constraints.get(node.meta["val"].node.expr)
    return allowed is None or bool(allowed.lower <= value <= allowed.upper)
