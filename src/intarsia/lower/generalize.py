"""From a model and a call to a lowered graph that takes as many sizes as were asked for.

A size that varies but is 1 in the example can tempt a model onto a path for that size alone. Such a model is
captured once more with everything given twice in that dimension, and that graph is taken if it answers the
call that was given too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from intarsia.capture.example import Call as Call
from intarsia.capture.export import capture
from intarsia.capture.input import honest_sizes
from intarsia.capture.size_guards import holds, read_guards
from intarsia.errors import CaptureError, IntarsiaError, LoweringError
from intarsia.lower import Lowered, lower
from intarsia.lower.lowered import example_inputs
from intarsia.lower.range_ends import at_sizes
from intarsia.lower.redundant_guards import drop_redundant_guards, least_asked

HasConverter = Callable[[Any], bool]
Place = tuple[int, int]  # a tensor of the call, and one of its dimensions


def lower_model(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
    *,
    has_converter: HasConverter,
    drop_guards: bool,
) -> tuple[Lowered, Call]:
    """The graph, and the call it was captured with. With `drop_guards`, redundant size guards are dropped."""
    call = args, kwargs
    ones = _ones(model, args, kwargs, dynamic_shapes) if drop_guards else []
    try:
        lowered = _lowered(model, call, dynamic_shapes, has_converter, drop_guards)
    except CaptureError:
        wide = _wide(model, call, dynamic_shapes, has_converter, ones)
        if wide is None:
            raise
        return wide
    if any(not _may_be(lowered, call, place, 3) for place in ones):
        return _wide(model, call, dynamic_shapes, has_converter, ones) or (lowered, call)
    return lowered, call


def _lowered(
    model: nn.Module, call: Call, dynamic_shapes: Any, has_converter: HasConverter, drop_guards: bool
) -> Lowered:
    program = capture(model, *call, dynamic_shapes)
    try:
        with honest_sizes():
            lowered = lower(program, has_converter=has_converter)
    except IntarsiaError:
        raise
    except Exception as error:  # torch could export the model, and could not take its graph apart
        raise LoweringError(f"{type(model).__name__} cannot be lowered: {_said(program, error)}") from error
    if drop_guards and isinstance(model, nn.Module):
        least = least_asked(dynamic_shapes)
        lowered = drop_redundant_guards(lowered, model, example_inputs(lowered, *call), least)
    return lowered


def _said(program: ExportedProgram, error: Exception) -> str:
    """Why torch could not take a graph apart; a failed assertion of its own says that to no user."""
    what = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    if "INTERNAL ASSERT" not in what:
        return what
    resizes = [node for node in program.graph.nodes if node.target is torch.ops.aten.resize_.default]
    if any(isinstance(size, fx.Node) for node in resizes for size in node.args[1]):
        return (
            "torch cannot take resize_ to a size that varies out of a graph; write what the result is to hold"
            " (x[:n], torch.nn.functional.pad, x.new_zeros), or let the size be fixed"
        )
    return f"torch fails in its own code ({what.split(' at ')[0]})"


def _wide(
    model: nn.Module,
    call: Call,
    dynamic_shapes: Any,
    has_converter: HasConverter,
    ones: Sequence[Place],
) -> tuple[Lowered, Call] | None:
    """The same of a call with two of what it has one of, if all of it may then be one, two or three."""
    if not ones:
        return None
    flat, structure = pytree.tree_flatten((tuple(call[0]), dict(call[1])))
    for index, axis in ones:
        flat[index] = flat[index].repeat_interleave(2, dim=axis)
    twice: Call = pytree.tree_unflatten(flat, structure)
    try:
        lowered = _lowered(model, twice, dynamic_shapes, has_converter, True)
    except (CaptureError, LoweringError):  # the model wants the sizes of the example
        return None
    fits = all(_may_be(lowered, twice, place, size) for place in ones for size in (1, 3))
    return (lowered, twice) if fits else None


def _may_be(lowered: Lowered, call: Call, place: Place, size: int) -> bool:
    """Whether a dimension of an input may have this size."""
    nodes = [node for node in lowered.module.graph.nodes if node.op == "placeholder"]
    node = next(n for n, item in zip(nodes, lowered.inputs, strict=True) if item.index == place[0])
    length = node.meta["val"].shape[place[1]]
    if isinstance(length, int):
        return length == size
    symbol = length.node.expr
    bounds = lowered.range_constraints.get(symbol)
    if bounds is not None and not bounds.lower <= size <= bounds.upper:
        return False
    inputs = at_sizes(lowered, example_inputs(lowered, *call), {symbol: size})
    places = {item.name: slot for slot, item in enumerate(lowered.inputs)}
    return all(holds(guard, inputs) for guard in read_guards(lowered.guards, places))


def _ones(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any
) -> list[Place]:
    """Where the example has a size of 1 that may vary."""
    if not isinstance(dynamic_shapes, dict | list | tuple) or not isinstance(model, nn.Module):
        return []
    try:  # torch.export reads what was said of sizes by the parameters of forward, `*args` as one of them
        bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except TypeError:  # not a call of this model, which whoever captures it will say
        return []
    asked: Any = dynamic_shapes
    if isinstance(asked, dict):
        asked = [asked.get(name) for name in bound]
    ones: list[Place] = []
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    for value, dims in _pairs([*bound.values()], asked):
        index = next(index for index, leaf in enumerate(leaves) if leaf is value)
        axes = dims.items() if isinstance(dims, dict) else enumerate(dims)
        ones += [(index, axis) for axis, dim in axes if _varies(dim) and value.shape[axis] == 1]
    return list(dict.fromkeys(ones))


def _pairs(values: Sequence[Any], asked: Any) -> Iterator[tuple[torch.Tensor, Any]]:
    """The tensors of a call, each with what was said of its dimensions."""
    for value, dims in zip(values, asked or (), strict=False):
        if isinstance(value, torch.Tensor) and isinstance(dims, dict | list | tuple):
            yield value, dims
        elif isinstance(value, list | tuple) and isinstance(dims, list | tuple):
            yield from _pairs(value, dims)
        elif isinstance(value, dict) and isinstance(dims, dict):
            yield from _pairs([value[key] for key in dims if key in value], [*dims.values()])


def _varies(dim: Any) -> bool:
    return dim is not None and not isinstance(dim, int) and dim != torch.export.Dim.STATIC
