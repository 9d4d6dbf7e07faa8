"""Which function converts which operator: `@converter`, priorities, validators, scoped overrides."""

from __future__ import annotations

import contextlib
import enum
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import fx

from intarsia.errors import ConversionError
from intarsia.network import Tensor
from intarsia.network import functional as F

if TYPE_CHECKING:
    from intarsia.convert.context import ConversionContext


Validator = Callable[[fx.Node], bool | str | None]
Author = TypeVar("Author", bound=Callable[..., Any])


class ConverterPriority(enum.IntEnum):
    """The order in which converters of an operator are tried. Shipped converters are STANDARD.

    >>> ConverterPriority.HIGH > ConverterPriority.STANDARD
    True
    """

    STANDARD = 0
    HIGH = 1


@dataclass(frozen=True)
class Converter:
    """One way to turn nodes of one target into layers."""

    target: Any
    convert: Function
    name: str
    validator: Validator | None = None
    priority: ConverterPriority = ConverterPriority.STANDARD
    supports_dynamic_shapes: bool = True
    shipped: bool = False
    order: int = field(default_factory=itertools.count().__next__)

    def refuses(self, node: fx.Node) -> str | None:
        """Why this converter refuses the node before conversion; None if it may be tried."""
        if not self.supports_dynamic_shapes and _is_dynamic(node):
            return f"{self.name} handles static shapes only"
        if self.validator is None:
            return None
        try:
            verdict = self.validator(node)
        except Exception as error:  # an author's mistake must cost this node, not the model
            return f"the validator of {self.name} failed: {type(error).__name__}: {error}"
        if isinstance(verdict, str):
            return verdict
        return None if verdict is None or verdict else f"the validator of {self.name} does not accept it"


class Registry:
    """Converters by target. Of several converters of a target, the first that accepts the node is used."""

    def __init__(self) -> None:
        self._converters: dict[Any, tuple[Converter, ...]] = {}
        self._lock = threading.Lock()
        self.version: int = 0  # grows with every change, so that remembered answers can be forgotten

    def register(self, added: Converter) -> None:
        with self._lock:
            present = self._converters.get(added.target, ())
            for other in present:
                if added.shipped and other.shipped and other.priority == added.priority:
                    raise ConversionError(
                        f"{added.name} and {other.name} both convert {added.target} at priority"
                        f" {added.priority.name}; give one a higher priority"
                    )
            self._store(added.target, (*present, added))

    def unregister(self, removed: Converter | Any) -> None:
        """Remove one converter, or all converters of a target."""
        target = removed.target if isinstance(removed, Converter) else key_of(removed)
        with self._lock:
            present = self._converters.get(target, ())
            others = tuple(c for c in present if isinstance(removed, Converter) and c is not removed)
            if len(others) == len(present):
                raise ConversionError(f"no converter of {target} is registered, so it cannot be removed")
            self._store(target, others)

    def converters(self, target: Any) -> tuple[Converter, ...]:
        """Converters in the order of trial: HIGH first, user converters before shipped ones, newer first."""
        return self._converters.get(target, ())

    def targets(self) -> list[Any]:
        return [target for target, converters in self._converters.items() if converters]

    def __contains__(self, target: object) -> bool:
        return bool(self._converters.get(target))

    @contextlib.contextmanager
    def override(self, *functions: Any, without: Any = ()) -> Iterator[Registry]:
        """In the `with` block, these converters come first, and the targets in `without` have none."""
        before = dict(self._converters)
        try:
            for target in without if isinstance(without, list | tuple | set) else (without,):
                with self._lock:
                    self._store(key_of(target), ())
            for function in functions:
                if not hasattr(function, "converters"):
                    raise ConversionError(f"{function!r} is not a converter; decorate it with @converter")
                for entry in function.converters:
                    with self._lock:
                        present = tuple(c for c in self._converters.get(entry.target, ()) if c is not entry)
                        first = Converter(**{**entry.__dict__, "priority": ConverterPriority.HIGH})
                        self._store(entry.target, (first, *present), sort=False)
            yield self
        finally:
            with self._lock:
                self._converters = before
                self.version += 1

    def _store(self, target: Any, converters: tuple[Converter, ...], sort: bool = True) -> None:
        if sort:
            converters = tuple(sorted(converters, key=lambda c: (-c.priority, c.shipped, -c.order)))
        self._converters = {**self._converters, target: converters}
        self.version += 1


registry: Registry = Registry()


def converter(
    *keys: Any,
    enabled: bool = True,
    capability_validator: Validator | None = None,
    priority: ConverterPriority = ConverterPriority.STANDARD,
    supports_dynamic_shapes: bool = True,
    register: bool = True,
) -> Callable[[Author], Author]:
    """Register a function as the converter of an operator (or of several).

    The function takes `(ctx, target, args, kwargs, name)`, or `ctx` and arguments of the operator's schema by
    name. An argument that it does not name must have its default value; otherwise the node is refused. If you
    register the function for several operators, give a Python default to parameters that only some of them
    have. The function returns the tensors of the operator's result.

    >>> import torch, intarsia
    >>> from intarsia.network import functional as F
    >>> @intarsia.converter(torch.ops.aten.leaky_relu.default, register=False)
    ... def leaky_relu(ctx, self, negative_slope=0.01):
    ...     return F.leaky_relu(self, negative_slope)
    """
    if not keys:
        raise ConversionError("@converter needs the operator that it converts")

    def decorate(function: Author) -> Author:
        shipped = (function.__module__ or "").startswith("intarsia.convert.aten")
        targets = [key_of(key) for key in keys]
        names = frozenset(name for target in targets for name in argument_names(target))
        converters = tuple(
            Converter(
                target=target,
                convert=adapt(function, target, names),
                name=function.__name__,
                validator=capability_validator,
                priority=priority,
                supports_dynamic_shapes=supports_dynamic_shapes,
                shipped=shipped,
            )
            for target in targets
        )
        function.converters = converters  # type: ignore[attr-defined]
        if enabled and register:
            for entry in converters:
                registry.register(entry)
        return function

    return decorate


def key_of(key: Any) -> Any:
    """The target of a key: an overload, an unambiguous packet, a custom operator, or a Python function."""
    if isinstance(key, torch.library.CustomOpDef):  # type: ignore[attr-defined]
        return _overload_of(key)
    if not isinstance(key, torch._ops.OpOverloadPacket):
        if not callable(key):
            raise ConversionError(f"{key!r} is not an operator")
        return key
    names: list[str] = key.overloads()  # type: ignore[no-untyped-call]
    overloads = [name for name in names if "out" not in name]
    plain = [name for name in overloads if not _is_scripting_only(getattr(key, name))]
    if len(plain) != 1:
        choices = ", ".join(plain)
        raise ConversionError(f"{key} has several overloads ({choices}); name the one you convert")
    return getattr(key, plain[0])


def _overload_of(custom: Any) -> Any:
    """The one overload of what `torch.library.custom_op` makes; torch has no public name for it."""
    overload = getattr(custom, "_opoverload", None)
    if not isinstance(overload, torch._ops.OpOverload):
        raise ConversionError(f"{custom!r} is registered only in torch.ops; name its overload there")
    return overload


def _is_scripting_only(overload: Any) -> bool:
    # TorchScript's scalar overloads (aten::sqrt.int ...) take no tensor and never reach a graph.
    return not any("Tensor" in str(argument.type) for argument in overload._schema.arguments)


def _is_dynamic(node: fx.Node) -> bool:
    values = [n.meta.get("val") for n in (*node.all_input_nodes, node)]
    return any(
        isinstance(size, torch.SymInt)
        for value in values
        if isinstance(value, torch.Tensor)
        for size in value.shape
    )


# One adapter from an author's function to the contract `(ctx, args, kwargs) -> tensors`.

Function = Callable[["ConversionContext", tuple[Any, ...], dict[str, Any]], Any]
_RAW = ("ctx", "target", "args", "kwargs", "name")


def adapt(function: Callable[..., Any], target: Any, elsewhere: frozenset[str] = frozenset()) -> Function:
    """Bind a converter, raw or with schema-named arguments; a name the schema lacks is an error now.

    A function that serves several overloads may name what only some of them have (`elsewhere`). In the other
    overloads the parameter has its Python default.
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
