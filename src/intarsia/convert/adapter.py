"""One adapter from an author's function to the contract `(ctx, args, kwargs) -> tensors`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from intarsia.errors import ConversionError
from intarsia.network import Tensor
from intarsia.network import functional as F

if TYPE_CHECKING:
    from intarsia.convert.context import ConversionContext

Function = Callable[["ConversionContext", tuple[Any, ...], dict[str, Any]], Any]
_RAW = ("ctx", "target", "args", "kwargs", "name")


def adapt(function: Callable[..., Any], target: Any, elsewhere: frozenset[str] = frozenset()) -> Function:
    """Bind a converter, raw or with schema-named arguments; a name the schema lacks is an error now.

    A function that serves several overloads may name what only some of them have (`elsewhere`). For the
    others the parameter keeps its Python default.
    """
    parameters = list(inspect.signature(function).parameters.values())
    names = [p.name for p in parameters]
    if tuple(names) == _RAW:
        return lambda ctx, args, kwargs: function(ctx, target, args, kwargs, ctx.name)
    schema = getattr(target, "_schema", None)
    if schema is None:
        return lambda ctx, args, kwargs: function(ctx, *_frozen(args), **_frozen(kwargs))
    known = argument_names(target)
    optional = {p.name for p in parameters if p.default is not p.empty} & elsewhere
    unknown = [name for name in names[1:] if name not in known and name not in optional]
    if unknown:
        raise ConversionError(f"{function.__name__} names {unknown}, but {target} has the arguments {known}")
    takes = set(names[1:])

    def bound(ctx: ConversionContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call: dict[str, Any] = {}
        for argument, value in _bind(schema, args, kwargs):
            if argument.name in takes:
                call[argument.name] = _frozen(value)
            elif not _is_default(value, argument):
                raise ConversionError(f"{argument.name}={_show(value)} is not handled")
        return function(ctx, **call)

    return bound


def argument_names(target: Any) -> list[str]:
    """The names of an operator's arguments; none of a target without a schema."""
    schema = getattr(target, "_schema", None)
    return [] if schema is None else [argument.name for argument in schema.arguments]


def _bind(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    bound = []
    for index, argument in enumerate(schema.arguments):
        if index < len(args) and not argument.kwarg_only:
            bound.append((argument, args[index]))
        elif argument.name in kwargs:
            bound.append((argument, kwargs[argument.name]))
        elif argument.has_default_value():
            bound.append((argument, argument.default_value))
        elif argument.name == "self" and "input" in kwargs:
            bound.append((argument, kwargs["input"]))
        else:
            raise ConversionError(f"the argument {argument.name} of {schema.name} is missing")
    return bound


# Where a tensor lies, or how its memory is laid out, means nothing inside an engine.
_IRRELEVANT = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})


def _is_default(value: Any, argument: Any) -> bool:
    if argument.name in _IRRELEVANT:
        return argument.name != "layout" or value in (None, torch.strided)
    if isinstance(value, Tensor | torch.Tensor):
        return False
    default = argument.default_value if argument.has_default_value() else None
    if isinstance(value, list | tuple) and isinstance(default, list | tuple):
        return list(value) == list(default)
    return bool(value == default)


def _frozen(value: Any) -> Any:
    """Frozen tensors as constants of the network, so that authors meet one tensor type."""
    if isinstance(value, torch.Tensor):
        return F.constant(value)
    if isinstance(value, list | tuple):
        return type(value)(_frozen(item) for item in value)
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return value


def _show(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(tuple(value)) if isinstance(value, list) else repr(value)
