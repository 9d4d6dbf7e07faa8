"""From a model and a call to a lowered graph with as many sizes as the user let vary.

With a size of 1 in the example, a model may take a branch for that size alone. Such a model is captured again
with that dimension doubled, and the second graph is used if it gives the same answer for the user's call.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from operator import itemgetter
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from intarsia.capture.example import Call as Call
from intarsia.capture.example import bound_arguments, copied_call, named_arguments
from intarsia.capture.export import capture
from intarsia.capture.input import honest_sizes
from intarsia.capture.output_objects import open_objects
from intarsia.capture.protect import evaluating
from intarsia.capture.size_guards import holds, input_path, read_guards
from intarsia.compare import disagreement
from intarsia.errors import CaptureError, IntarsiaError, LoweringError, error_text
from intarsia.lower import Lowered, Role, lower
from intarsia.lower.integers import letting_vary, other_values, plain_integers, used_as_numbers
from intarsia.lower.lowered import example_inputs
from intarsia.lower.size_examples import at_sizes

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
    """The graph, and the call it was captured with. `drop_guards` drops guards that do not matter."""
    call = args, kwargs
    if drop_guards and dynamic_shapes is None:
        varied = _of_any_integers(model, call, has_converter)
        if varied is not None:
            return varied, call
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


def _of_any_integers(model: nn.Module, call: Call, has_converter: HasConverter) -> Lowered | None:
    """The graph with integer arguments that may vary; None if it has none, or needs their values.

    It must answer as the model does at several values: Python code that checks the type of an integer takes
    another branch while torch traces.
    """
    names = plain_integers(model, *call)
    try:
        while names:
            program = capture(model, *copied_call(call), letting_vary(names, model, *call))
            numbers = used_as_numbers(program, names)
            if numbers == names:
                break
            names = numbers
        if not names:
            return None
        lowered = _taken_apart(program, model, has_converter)
    except IntarsiaError:  # capturing with the example's integers succeeds, or raises a better error
        return None
    if any(output.role is not Role.USER for output in lowered.outputs):  # a run would change the model
        return None
    example = example_inputs(lowered, *call)
    others = other_values(lowered, example)
    answered = [_answers_alike(lowered, model, inputs) for inputs in (example, *others)]
    return lowered if all(answered) and others else None


def _lowered(
    model: nn.Module, call: Call, dynamic_shapes: Any, has_converter: HasConverter, drop_guards: bool
) -> Lowered:
    program = capture(model, *call, dynamic_shapes)
    lowered = _taken_apart(program, model, has_converter)
    if drop_guards and isinstance(model, nn.Module):
        least = least_excluded_sizes(dynamic_shapes)
        lowered = drop_redundant_guards(lowered, model, example_inputs(lowered, *call), least)
    return lowered


def _taken_apart(program: ExportedProgram, model: nn.Module, has_converter: HasConverter) -> Lowered:
    try:
        with honest_sizes():
            return lower(program, has_converter=has_converter)
    except IntarsiaError:
        raise
    except Exception as error:  # torch exported the model, but cannot decompose its graph
        raise LoweringError(f"{type(model).__name__} cannot be lowered: {_cause(program, error)}") from error


def _cause(program: ExportedProgram, error: Exception) -> str:
    """Why torch could not decompose a graph. Its failed assertions are replaced by a sentence."""
    what = error_text(error)
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
    """The graph of the call with these dimensions doubled, if they may then be 1, 2 or 3; otherwise None."""
    if not ones:
        return None
    flat, structure = pytree.tree_flatten((tuple(call[0]), dict(call[1])))
    for index, axis in ones:
        flat[index] = flat[index].repeat_interleave(2, dim=axis)
    twice: Call = pytree.tree_unflatten(flat, structure)
    try:
        lowered = _lowered(model, twice, dynamic_shapes, has_converter, True)
    except (CaptureError, LoweringError):  # the model needs the sizes of the example
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
    """The dimensions of the example that may vary and have size 1."""
    if not isinstance(dynamic_shapes, dict | list | tuple) or not isinstance(model, nn.Module):
        return []
    bound = bound_arguments(model, args, kwargs)
    if bound is None:
        return []
    shapes: Any = dynamic_shapes
    if isinstance(shapes, dict):
        shapes = [shapes.get(name) for name in named_arguments(bound)]  # `*args` is one of them
    ones: list[Place] = []
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    for value, dims in _pairs([*named_arguments(bound).values()], shapes):
        index = next(index for index, leaf in enumerate(leaves) if leaf is value)
        axes = dims.items() if isinstance(dims, dict) else enumerate(dims)
        ones += [(index, axis) for axis, dim in axes if _varies(dim) and value.shape[axis] == 1]
    return list(dict.fromkeys(ones))


def _pairs(values: Sequence[Any], shapes: Any) -> Iterator[tuple[torch.Tensor, Any]]:
    """The tensors of a call, each with the `dynamic_shapes` of its dimensions."""
    for value, dims in zip(values, shapes or (), strict=False):
        if isinstance(value, torch.Tensor) and isinstance(dims, dict | list | tuple):
            yield value, dims
        elif isinstance(value, list | tuple) and isinstance(dims, list | tuple):
            yield from _pairs(value, dims)
        elif isinstance(value, dict) and isinstance(dims, dict):
            yield from _pairs([value[key] for key in dims if key in value], [*dims.values()])


def _varies(dim: Any) -> bool:
    return dim is not None and not isinstance(dim, int) and dim != torch.export.Dim.STATIC


# Guards that do not matter, because the graph gives the model's answers without them.
#
# Export adds `x.shape[0] != 1` where code compares a size with 1, most often to broadcast, and `> 1` where
# code asks for a memory layout. Mostly neither changes the result. Such a guard depends on one size alone, so
# running the model at the excluded sizes decides.

_SIZES = re.compile(r"(L\[[^()]+?\])\.size\(\)\[(\d+)\]")
_UNEQUAL = re.compile(r".+ != \d+")
_ONE_SIZE = re.compile(r"(L\[.+\])\.size\(\)\[(\d+)\] (!=|>|>=) (\d+)")


def drop_redundant_guards(
    lowered: Lowered, model: nn.Module, example: Sequence[Any], least: int = 0
) -> Lowered:
    """The graph without the guards on one size, for the sizes at which model and graph answer alike.

    A model that writes to its buffers or inputs is not run for this, so its guards stay. Sizes below `least`,
    which the user does not want, are not tried: kernels of PyTorch divide by a size of 0, which ends the
    process.
    """
    if not lowered.guards or any(output.role is not Role.USER for output in lowered.outputs):
        return lowered
    guards: list[str] = []
    ranges = dict(lowered.range_constraints)
    for text in lowered.guards:
        excluded = _excluded_sizes(text, lowered)
        if excluded is None:
            if not _is_needless(text, lowered, model, example):
                guards.append(text)
            continue
        symbol, sizes = excluded[0], [size for size in excluded[1] if size >= least]
        if not sizes:
            guards.append(text)
            continue
        # From the largest size down, since an answer without elements says nothing about larger sizes.
        inputs = ((size, at_sizes(lowered, example, {symbol: size})) for size in sizes)
        tried = ((size, _answers_alike(lowered, model, like)) for size, like in inputs)
        alike = [size for size, _ in takewhile(itemgetter(1), tried)]
        if len(alike) < len(excluded[1]):
            guards.append(text if not alike else _weaker(text, alike[-1]))
        if alike and symbol in ranges and ranges[symbol].lower == sizes[0] + 1:
            # The bound comes from this guard; with a bound of the user's, there would be no guard.
            ranges[symbol] = type(ranges[symbol])(alike[-1], ranges[symbol].upper)
    return replace(lowered, guards=tuple(guards), range_constraints=ranges)


def least_excluded_sizes(dynamic_shapes: Any) -> int:
    """The smallest size that the user gave for any dimension; 0 if there is none.

    >>> least_excluded_sizes(({0: torch.export.Dim("n", min=1, max=8)},)), least_excluded_sizes(None)
    (1, 0)
    """
    dims = [dim for dim in pytree.tree_leaves(dynamic_shapes) if dim is not None and not isinstance(dim, int)]
    return min((getattr(dim, "min", None) or 0 for dim in dims), default=0)


def _answers_alike(lowered: Lowered, model: nn.Module, like: Sequence[Any]) -> bool:
    """Whether the graph answers as the model does, for inputs of these sizes with other values."""
    try:
        inputs = [_other_values(value) for value in like]
        flat = {item.index: value for item, value in zip(lowered.inputs, inputs, strict=True)}
        args, kwargs = pytree.tree_unflatten([flat[place] for place in range(len(flat))], lowered.in_spec)
        with torch.no_grad(), evaluating(model), torch.random.fork_rng(devices=[]):
            expected, shape = pytree.tree_flatten(open_objects(model(*args, **kwargs)))
            answers = lowered.module(*inputs)
    except Exception:  # the model or the graph fails at this size, so the guard stays
        return False
    if shape != lowered.out_spec or len(answers) != len(expected):
        return False
    pairs = [(a, e) for a, e in zip(answers, expected, strict=True) if isinstance(e, torch.Tensor)]
    if not all(isinstance(answer, torch.Tensor) for answer, _ in pairs):
        return False
    return disagreement([answer for answer, _ in pairs], [truth for _, truth in pairs]) is None


def _is_needless(text: str, lowered: Lowered, model: nn.Module, example: Sequence[Any]) -> bool:
    """Whether model and graph answer alike where a guard on several sizes, `... != 1`, does not hold.

    The smallest such sizes are tried: a product of sizes is 1 if each of them is.
    """
    if not _UNEQUAL.fullmatch(text):
        return False
    names = {item.name: slot for slot, item in enumerate(lowered.inputs)}
    symbols: list[sympy.Symbol] = []
    for path, axis in _SIZES.findall(text):
        symbol = _symbol_of(path, int(axis), lowered)
        if symbol is None:
            return False
        symbols.append(symbol)
    symbols = list(dict.fromkeys(symbols))
    if not 0 < len(symbols) <= 4:
        return False
    try:
        (guard,) = read_guards([text], names)
    except CaptureError:
        return False
    ranges = lowered.range_constraints
    lows = [max(0, int(ranges[s].lower)) if s in ranges else 0 for s in symbols]
    combinations = itertools.product(*(range(low, low + 3) for low in lows))
    excluded = [dict(zip(symbols, sizes, strict=True)) for sizes in combinations]
    excluded = [sizes for sizes in excluded if not guard.holds(at_sizes(lowered, example, sizes))]
    full = [sizes for sizes in excluded if all(sizes.values())]
    return 0 < len(full) == len(excluded) <= 4 and all(
        _answers_alike(lowered, model, at_sizes(lowered, example, sizes)) for sizes in full
    )


def _excluded_sizes(text: str, lowered: Lowered) -> tuple[sympy.Symbol, list[int]] | None:
    """The symbol of a guard on one size, and the sizes that it excludes, the largest first."""
    match = _ONE_SIZE.fullmatch(text)
    if match is None:
        return None
    number = int(match[4])
    sizes = [number] if match[3] == "!=" else [*range(number - (match[3] == ">="), -1, -1)]
    if not 0 < len(sizes) <= 2:
        return None
    symbol = _symbol_of(match[1], int(match[2]), lowered)
    return None if symbol is None else (symbol, sizes)


def _symbol_of(path: str, axis: int, lowered: Lowered) -> sympy.Symbol | None:
    """The symbol of an input's size, which guards name by a path."""
    name = input_path(ast.parse(path, mode="eval").body)
    for node in lowered.module.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and node.target == name and isinstance(value, torch.Tensor):
            size: Any = value.shape[axis]
            symbol = getattr(getattr(size, "node", None), "expr", None)
            return symbol if isinstance(symbol, sympy.Symbol) else None
    return None


def _weaker(text: str, least: int) -> str:
    """A guard that excludes only the sizes below `least`."""
    path = text[: text.rindex("]") + 1]
    return f"{path} >= {least}"


def _other_values(value: Any) -> Any:
    """Floating-point inputs with random values added, since an example may be all ones."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    generator = torch.Generator().manual_seed(0)
    return torch.rand(value.shape, generator=generator).to(value) + value
