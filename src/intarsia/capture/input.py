"""`Input`: an input described by shapes instead of an example, and the ranges its sizes may take."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from intarsia.capture.example import bound_arguments, distinct_inputs, named_arguments
from intarsia.errors import InputError, near_names, range_text

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Input:
    """An input of the example: a tensor of a fixed `shape`, or of a range of shapes.

    Args:
        shape: the shape, if it never changes.
        min_shape: the smallest shape.
        opt_shape: the most usual shape. Engines that build for one shape use it.
        max_shape: the largest shape.
        dtype: the element type.
        device: the device of the example.
        domain: the range of the values, such as `(0, vocabulary)` for token ids.

    Example:
        >>> image = Input(min_shape=(1, 3, 224, 224), opt_shape=(8, 3, 224, 224), max_shape=(32, 3, 224, 224))
        >>> image.ranges
        {0: (1, 32)}
    """

    shape: Shape | None = None
    min_shape: Shape | None = None
    opt_shape: Shape | None = None
    max_shape: Shape | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    domain: tuple[float, float] = (0.0, 2.0)

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype):
            raise InputError(f"Input's dtype is {self.dtype!r}; give a torch.dtype, such as torch.float32")
        shapes = [self.min_shape, self.opt_shape, self.max_shape]
        if self.shape is not None:
            if any(shape is not None for shape in shapes):
                raise InputError(f"Input has shape={self.shape} and a range of shapes; give one of them")
            shapes = [self.shape] * 3
        least, usual, most = shapes
        if least is None or usual is None or most is None:
            raise InputError("Input needs shape, or all of min_shape, opt_shape and max_shape")
        if not len(least) == len(usual) == len(most):
            raise InputError(f"Input's shapes differ in rank: {least}, {usual}, {most}")
        for axis, (low, mid, high) in enumerate(zip(least, usual, most, strict=True)):
            if not 0 <= low <= mid <= high:
                raise InputError(f"Input's sizes in dimension {axis} must rise from 0: {low}, {mid}, {high}")
        for name, value in zip(("min_shape", "opt_shape", "max_shape"), (least, usual, most), strict=True):
            object.__setattr__(self, name, tuple(value))

    @property
    def ranges(self) -> dict[int, tuple[int, int]]:
        """The dimensions that vary, each with its least and largest size."""
        assert self.min_shape is not None and self.max_shape is not None  # __post_init__ saw to it
        pairs = enumerate(zip(self.min_shape, self.max_shape, strict=True))
        return {axis: (low, high) for axis, (low, high) in pairs if low != high}

    def tensor(self, which: str = "opt") -> torch.Tensor:
        """An example of the `min`, `opt` or `max` shape."""
        shape = {"min": self.min_shape, "opt": self.opt_shape, "max": self.max_shape}.get(which)
        if shape is None:
            raise InputError(f"there is no {which!r} shape; ask for 'min', 'opt' or 'max'")
        return self._draw(shape)

    def example(self) -> torch.Tensor:
        """The example to export with: the usual shape, but no size of 0 or 1 where the size may vary.

        An example of size 1 looks to export like a size that is always 1.
        """
        assert self.opt_shape is not None
        shape = list(self.opt_shape)
        for axis, (_, high) in self.ranges.items():
            shape[axis] = max(shape[axis], min(2, high))
        return self._draw(tuple(shape))

    def _draw(self, shape: Shape) -> torch.Tensor:
        low, high = self.domain
        generator = torch.Generator().manual_seed(0)
        drawn = torch.rand(shape, generator=generator) * (high - low) + low
        if not self.dtype.is_floating_point and self.dtype != torch.bool:
            drawn = drawn.floor().clamp(max=max(low, high - 1))
        return (drawn >= (low + high) / 2 if self.dtype == torch.bool else drawn).to(self.device, self.dtype)


@dataclass(frozen=True)
class Resolved:
    """Arguments with every `Input` replaced: examples, `dynamic_shapes` for export, and the corners."""

    args: tuple[Any, ...]
    dynamic_shapes: tuple[Any, ...] | None
    corners: dict[str, tuple[Any, ...]]


def resolve(args: Sequence[Any]) -> Resolved:
    """Replace every `Input` among `args`; other arguments stay what they are.

    `corners` holds the arguments at "min", "opt" and "max", to try a compiled module at; it is empty when
    nothing varies.

    Example:
        >>> resolve((Input(shape=(2, 3)),)).args[0].shape
        torch.Size([2, 3])
    """
    examples = tuple(arg.example() if isinstance(arg, Input) else arg for arg in args)
    if not any(isinstance(arg, Input) and arg.ranges for arg in args):
        return Resolved(examples, None, {})
    dims = tuple(_dims(arg) if isinstance(arg, Input) else _static(arg) for arg in args)
    corners = {
        which: tuple(arg.tensor(which) if isinstance(arg, Input) else arg for arg in args)
        for which in ("min", "opt", "max")
    }
    return Resolved(examples, dims, corners)


def check_model(model: Any, *kinds: type) -> None:
    """Raise InputError for what is no model."""
    if not isinstance(model, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds).replace("Module", "nn.Module")
        given = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise InputError(f"a model must be an {wanted}, not {given}")


def check_call(model: Any, args: Any, kwargs: Any) -> None:
    """Raise InputError for what is no model, or no call."""
    check_model(model, nn.Module, ExportedProgram)
    if not isinstance(args, list | tuple):
        raise InputError(f"args must be a tuple of inputs, not a {type(args).__name__}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InputError(f"kwargs must be inputs by name, not a {type(kwargs).__name__}")


def resolve_call(
    model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any
) -> tuple[Sequence[Any], Mapping[str, Any], Any]:
    """The call to export with, every `Input` in it replaced, and the `dynamic_shapes` they ask for."""
    if not any(isinstance(value, Input) for value in (*args, *kwargs.values())):
        if isinstance(model, nn.Module):
            check_dynamic_shapes(model, args, kwargs, dynamic_shapes)
            dynamic_shapes = _completed(model, args, kwargs, dynamic_shapes)
        return (*_example_call(model, args, kwargs), dynamic_shapes)
    if isinstance(model, ExportedProgram):
        raise InputError(
            "an ExportedProgram has its own shapes and ranges; give tensors or nothing, not an Input"
        )
    if dynamic_shapes is not None:
        raise InputError("both an Input and dynamic_shapes say which sizes vary; give one of them")
    resolved = resolve((*args, *kwargs.values()))
    named = dict(zip(kwargs, resolved.args[len(args) :], strict=True))
    examples = distinct_inputs(model, resolved.args[: len(args)], named)
    if resolved.dynamic_shapes is None:
        return (*examples, None)
    count = len(args)
    by_name = dict(zip(kwargs, resolved.dynamic_shapes[count:], strict=True))
    bound = bound_arguments(model, resolved.dynamic_shapes[:count], by_name)
    dims = None if bound is None else named_arguments(bound)
    check_dynamic_shapes(model, *examples, dims)
    return (*examples, dims)


def check_dynamic_shapes(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any
) -> None:
    """Raise InputError for `dynamic_shapes` that name no argument of the call, or no dimension of one."""
    if dynamic_shapes is None or hasattr(dynamic_shapes, "dynamic_shapes"):  # torch.export.ShapesCollection
        return
    if not isinstance(dynamic_shapes, Mapping | list | tuple):
        what = "give the dimensions that vary of each argument, such as {'x': {0: Dim('batch')}}"
        raise InputError(f"dynamic_shapes={dynamic_shapes!r}; {what}")
    call = bound_arguments(model, args, kwargs)
    if call is None:
        return
    bound = named_arguments(call)
    named = dynamic_shapes if isinstance(dynamic_shapes, Mapping) else {}
    for name in named:
        if name not in bound:
            hint = near_names(name, bound) or f"; they are {', '.join(bound)}"
            raise InputError(f"dynamic_shapes names {name!r}, which is not an argument of the call{hint}")
    if not named and len(dynamic_shapes) > len(bound):
        what = f"dynamic_shapes has {len(dynamic_shapes)} entries; the call has {len(bound)}"
        raise InputError(f"{what}: {', '.join(bound)} (what *args takes is one entry, a tuple)")
    pairs = named.items() if named else zip(bound, dynamic_shapes, strict=False)
    for name, dims in pairs:
        _check_dims(name, bound[name], dims)


def _completed(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], shapes: Any) -> Any:
    """`dynamic_shapes` with an entry for every argument, as torch.export needs; the others do not vary."""
    call = bound_arguments(model, args, kwargs) if isinstance(shapes, Mapping) else None
    if call is None:
        return shapes
    return {name: shapes.get(name, _static(value)) for name, value in named_arguments(call).items()}


def _check_dims(name: str, value: Any, dims: Any) -> None:
    if isinstance(value, list | tuple) and dims is not None:
        if not isinstance(dims, list | tuple) or len(dims) != len(value):
            what = f"{name} holds {len(value)} values, and dynamic_shapes gives it {dims!r}"
            raise InputError(f"{what}; give a tuple with an entry for each value")
        for place, (item, of_item) in enumerate(zip(value, dims, strict=True)):
            _check_dims(f"{name}[{place}]", item, of_item)
    elif isinstance(value, Mapping) and isinstance(dims, Mapping):
        for key in dims:
            _check_dims(f"{name}[{key!r}]", value.get(key), dims[key])
    elif isinstance(value, torch.Tensor) and isinstance(dims, Mapping | list | tuple):
        axes = dims if isinstance(dims, Mapping) else dict(enumerate(dims))
        for axis, dim in axes.items():
            if not isinstance(axis, int) or not 0 <= axis < value.dim():
                what = f"dimension {axis!r} of {name}, which has {value.dim()} dimensions"
                raise InputError(f"dynamic_shapes names {what}")
            if isinstance(dim, str | float | bool):
                what = f"{dim!r} for dimension {axis} of {name}; give a torch.export.Dim"
                raise InputError(f"dynamic_shapes gives {what}, such as Dim({str(dim)!r})")
            low, high = getattr(dim, "min", None), getattr(dim, "max", None)
            low, high = 0 if low is None else low, math.inf if high is None else high
            if not low <= value.shape[axis] <= high:
                what = f"size {value.shape[axis]} in dimension {axis} of {name}"
                allowed = range_text(low, high)
                raise InputError(f"the example has {what}, where dynamic_shapes has {allowed}")
    elif isinstance(value, torch.Tensor) and dims is not None:
        what = f"{dims!r} for {name}; give its dimensions that vary"
        raise InputError(f"dynamic_shapes gives {what}, such as {{0: Dim('batch')}}")


def _example_call(
    model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example as given; a program that was exported brings its own."""
    if isinstance(model, ExportedProgram) and not args and not kwargs and model.example_inputs is not None:
        args, kwargs = model.example_inputs
    return distinct_inputs(model, args, kwargs)


@contextmanager
def honest_sizes() -> Iterator[bool]:
    """Export under this, and a range from 0 or 1 stays one: sizes 0 and 1 are not assumed away.

    Gives whether this torch can do it. Where it cannot, export narrows such a range to start at 2, and the
    program's range constraints say so.
    """
    try:
        from torch.fx.experimental import _config as settings
    except ImportError:
        yield False
        return
    settings_patch = getattr(settings, "patch", None)  # made at run time, so unknown to type checkers
    if settings_patch is None or not hasattr(settings, "backed_size_oblivious"):
        yield False
        return
    patched: AbstractContextManager[None] = settings_patch(backed_size_oblivious=True)
    with patched:
        yield True


def _dims(input: Input) -> dict[int, Any] | None:
    return {axis: Dim.DYNAMIC(min=low, max=high) for axis, (low, high) in input.ranges.items()} or None


def _static(arg: Any) -> Any:
    """The `dynamic_shapes` entry of an argument that does not vary: None for every leaf."""
    return torch.utils._pytree.tree_map(lambda _: None, arg)


def further_calls(
    examples: Sequence[Sequence[Any]], kwargs: Mapping[str, Any]
) -> list[tuple[tuple[Any, ...], Mapping[str, Any]]]:
    """Calls of `examples`, the positional arguments of each, with the keyword arguments of the first call."""
    if isinstance(examples, torch.Tensor) or not isinstance(examples, Sequence):
        raise InputError(f"examples are {examples!r}; give a list of calls, such as [(x,), (y,)]")
    for place, example in enumerate(examples):
        if not isinstance(example, tuple | list):
            raise InputError(
                f"examples[{place}] is a {type(example).__name__}; each is the positional arguments of a"
                " call, such as (x,)"
            )
    return [(tuple(example), kwargs) for example in examples]
