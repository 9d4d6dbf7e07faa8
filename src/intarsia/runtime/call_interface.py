"""The interface of a compiled module: how a call maps to the inputs of its graph.

Every call is checked against the structure, shapes, dtypes and devices it was compiled for.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from intarsia.capture.size_guards import check_guards, read_guards
from intarsia.errors import InputError, count_text, range_text
from intarsia.lower import Lowered

if TYPE_CHECKING:
    import sympy


@dataclass(frozen=True)
class CallInterface:
    """The calls that a compiled module takes, and which value of a call is which input of the graph.

    `checks` has one check for each value of the flattened call. `signature` is that of the model's `forward`,
    if it is known, so that arguments may be passed by position or by name.
    """

    lowered: Lowered
    checks: tuple[Check, ...]
    signature: inspect.Signature | None = None

    @cached_property
    def plain_arguments(self) -> int:
        """The number of positional inputs if all are leaves and none is passed by name; otherwise -1."""
        args, kwargs = children(self.lowered.in_spec)
        leaves = all(child.is_leaf() for child in children(args))
        return len(children(args)) if leaves and not kwargs.context else -1

    @cached_property
    def in_order(self) -> bool:
        """Whether the flattened call equals the graph's inputs, without buffers and in the same order."""
        return [item.index for item in self.lowered.inputs] == list(range(len(self.checks)))

    @cached_property
    def fixed(self) -> list[FixedInput] | None:
        """Dtype, shape and device of every input, if all are tensors of fixed shapes."""
        if self.plain_arguments < 0 or not self.in_order or self._guards or self._complex:
            return None
        fixed = []
        for check in self.checks:
            if not isinstance(check, TensorCheck) or check.static is None or check.strides is not None:
                return None
            fixed.append((check.dtype, check.static, check.device))
        return fixed

    @cached_property
    def _guards(self) -> Any:
        places = {item.name: item.index for item in self.lowered.inputs if item.index is not None}
        return read_guards(self.lowered.guards, places)

    @cached_property
    def _complex(self) -> set[int]:
        """The places of complex tensors in a flattened call."""
        pairs = enumerate(self.checks)
        return {i for i, check in pairs if isinstance(check, TensorCheck) and check.dtype.is_complex}

    def check(self, flat: list[Any]) -> None:
        """Raise InputError, naming the input, if a flattened call does not pass the checks."""
        check_inputs(self.checks, flat, self.lowered.range_constraints)
        if self._guards:
            check_guards(self._guards, flat)

    def feed(self, flat: list[Any]) -> list[Any]:
        """The graph's inputs: those of the call, and the buffers that the model changes."""
        if self._complex:  # the graph calls `view_as_real`, which torch refuses for a lazy conjugate
            flat = [v.resolve_conj() if i in self._complex else v for i, v in enumerate(flat)]
        if self.in_order:
            return flat
        buffers = self.lowered.buffers
        return [buffers[i.buffer] if i.buffer else flat[i.index or 0] for i in self.lowered.inputs]

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The call as a list, in the order of `checks`; InputError if its structure differs."""
        if self.plain_arguments == len(args) and not kwargs:
            return list(args)
        spec = self.lowered.in_spec
        positional, named = split_spec(spec)
        if (len(args), set(kwargs)) != (positional, set(named)):
            args, kwargs = self._rebind(args, kwargs, positional, named)
        flat, structure = pytree.tree_flatten((args, {name: kwargs[name] for name in named}))
        if structure != spec:
            raise InputError(self._difference(structure))
        return flat

    def _difference(self, structure: pytree.TreeSpec) -> str:
        """How the structure of a call differs, at the first argument that does."""
        (args, kwargs), (own_args, own_kwargs) = children(structure), children(self.lowered.in_spec)
        parameters = [] if self.signature is None else list(self.signature.parameters.values())
        names = [
            p.name for p in parameters if p.kind is not p.VAR_POSITIONAL and p.name not in kwargs.context
        ]
        pairs = enumerate(zip(children(args), children(own_args), strict=True))
        named = [(names[place] if place < len(names) else str(place), *both) for place, both in pairs]
        named += zip(kwargs.context, children(kwargs), children(own_kwargs), strict=True)
        found = (_difference_of(f"argument {name}", one, own) for name, one, own in named)
        return next(filter(None, found), f"the call has the structure {structure}")

    def _rebind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], positional: int, named: list[str]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same call, with arguments passed by position and by name as when compiled."""
        expected = f"{positional} positional arguments" + (f" and {', '.join(named)}" if named else "")
        if self.signature is not None:
            try:
                bound = dict(self.signature.bind(*args, **kwargs).arguments)
            except TypeError as error:
                raise InputError(f"the call does not fit the model: {error}") from error
            bound = with_defaults(self.signature, bound, positional, named)
            order = [name for name in self.signature.parameters if name in bound]
            if len(order) == positional + len(named) and all(name in bound for name in named):
                rest = [name for name in order if name not in named]
                return tuple(bound[name] for name in rest), {name: bound[name] for name in named}
        has = f"{len(args)} positional arguments" + (f" and {', '.join(kwargs)}" if kwargs else "")
        raise InputError(f"the call has {has}; compiled for {expected}")


def with_defaults(
    signature: inspect.Signature, bound: dict[str, Any], positional: int, named: Sequence[str]
) -> dict[str, Any]:
    """The arguments as compiled: with defaults for omitted ones, without others that repeat their default."""
    plain = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    wanted = [*[p.name for p in plain if p.name not in named][:positional], *named]
    filled = dict(bound)
    for parameter in plain:
        name, default = parameter.name, parameter.default
        if default is parameter.empty:
            continue
        if name in wanted:
            filled.setdefault(name, default)
        elif name in bound and _is_same(bound[name], default):
            del filled[name]
        elif name in bound:
            raise InputError(
                f"argument {name} is {_shown(bound[name])}; compiled for its default, {default!r}"
            )
    return filled


def _is_same(value: Any, default: Any) -> bool:
    if value is default:
        return True
    if type(value) is type(default) is float:
        return repr(value) == repr(default)  # -0.0 equals 0.0, and NaN does not equal itself
    plain = (bool, int, float, str, bytes, tuple, torch.dtype, torch.device)
    return isinstance(default, plain) and type(value) is type(default) and bool(value == default)


def split_spec(spec: pytree.TreeSpec) -> tuple[int, list[str]]:
    """The number of arguments passed by position, and the names of the others."""
    args, kwargs = children(spec)
    return len(children(args)), list(kwargs.context)


def children(spec: pytree.TreeSpec) -> list[pytree.TreeSpec]:
    """The structures one level below this one."""
    method = getattr(spec, "children", None)  # torch 2.11 may have only the field `children_specs`
    return list(method()) if callable(method) else list(spec.children_specs)


def _difference_of(name: str, structure: pytree.TreeSpec, own: pytree.TreeSpec) -> str | None:
    """Where one structure differs from the other, in a clause."""
    parts, own_parts = children(structure), children(own)
    if (structure.type, structure.context, len(parts)) != (own.type, own.context, len(own_parts)):
        return f"{name} is {_form(structure)}; compiled for {_form(own)}"
    keys = structure.context if isinstance(structure.context, list) else range(len(parts))
    triples = zip(keys, parts, own_parts, strict=True)
    return next(filter(None, (_difference_of(f"{name}[{key!r}]", *both) for key, *both in triples)), None)


def _form(structure: pytree.TreeSpec) -> str:
    """What a value is, without its content."""
    if structure.is_leaf():
        return "one value"
    keys, count = structure.context, len(children(structure))
    content = (
        f"the keys {', '.join(map(repr, keys))}" if isinstance(keys, list) else count_text(count, "value")
    )
    return f"a {structure.type.__name__} with {content}" if count else f"an empty {structure.type.__name__}"


FixedInput = tuple[torch.dtype, torch.Size, torch.device]


@dataclass(frozen=True)
class TensorCheck:
    """The check of one tensor; `shape` has sizes, and symbols that are bound or compared."""

    name: str
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int | sympy.Expr, ...]
    static: torch.Size | None
    strides: tuple[int, ...] | None = None  # if the model reads this input by its strides

    @staticmethod
    def of(name: str, value: torch.Tensor, strides: tuple[int, ...] | None = None) -> TensorCheck:
        shape = tuple(size if isinstance(size, int) else size.node.expr for size in value.shape)
        static = torch.Size(shape) if all(isinstance(size, int) for size in shape) else None
        return TensorCheck(name, value.dtype, value.device, shape, static, strides)


@dataclass(frozen=True)
class ConstantCheck:
    """The check of an input that was a plain value when the model was compiled, and is a constant now."""

    name: str
    value: Any


@dataclass(frozen=True)
class IntegerCheck:
    """The check of an integer of any value; `example` is the one that the model was compiled with."""

    name: str
    example: int


Check = TensorCheck | ConstantCheck | IntegerCheck


def check_inputs(checks: tuple[Check, ...], flat: list[Any], ranges: Mapping[Any, Any]) -> None:
    """Raise InputError, naming the input, if the call does not pass the checks."""
    symbols: dict[Any, int] | None = None
    for check, value in zip(checks, flat, strict=True):
        if check.__class__ is not TensorCheck:
            if isinstance(check, ConstantCheck):
                _check_constant(check, value)
            elif type(value) is not int:
                raise InputError(f"input {check.name} must be an integer, not {_shown(value)}")
            continue
        if value.__class__ is not torch.Tensor and not isinstance(value, torch.Tensor):
            raise InputError(f"input {check.name} must be a tensor, not a {type(value).__name__}")
        if value.dtype is not check.dtype:
            raise InputError(f"input {check.name} has dtype {value.dtype}; compiled for {check.dtype}")
        if value.device != check.device:
            raise InputError(f"input {check.name} is on {value.device}; compiled for {check.device}")
        if value.is_nested:  # torch raises an internal error for the shape of one
            raise InputError(f"input {check.name} is a nested tensor; compiled for a plain one")
        if check.strides is not None and value.stride() != check.strides:
            raise InputError(
                f"input {check.name} has strides {value.stride()}; the model reads it by its strides, and was"
                f" compiled for {check.strides}"
            )
        if check.static is not None:
            if value.shape != check.static:
                raise InputError(
                    f"input {check.name} has shape {tuple(value.shape)}; compiled for {tuple(check.static)}"
                )
            continue
        symbols = {} if symbols is None else symbols
        _bind(check, value, symbols, ranges)
    if symbols:
        _check_derived(checks, flat, symbols)


def _check_constant(check: ConstantCheck, value: Any) -> None:
    is_alike = type(value) is type(check.value)
    if _is_same(value, check.value) or (is_alike and type(value) is not float and value == check.value):
        return
    varies = is_alike and type(value) is int
    advice = "; to let it vary, compile with dynamic_shapes that has Dim.DYNAMIC for it" if varies else ""
    raise InputError(f"input {check.name} is {_shown(value)}; compiled for {check.value!r}{advice}")


def _shown(value: Any) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else repr(value)


def _bind(
    check: TensorCheck, value: torch.Tensor, symbols: dict[Any, int], ranges: Mapping[Any, Any]
) -> None:
    shape = tuple(value.shape)
    if len(shape) != len(check.shape):
        raise InputError(f"input {check.name} has {len(shape)} dimensions; compiled for {len(check.shape)}")
    for axis, (size, wanted) in enumerate(zip(shape, check.shape, strict=True)):
        if isinstance(wanted, int) or wanted.is_Integer:  # a size that the model or the user fixed
            if size != wanted:
                raise InputError(
                    f"input {check.name} has size {size} in dimension {axis}; compiled for {wanted}"
                )
        elif wanted.is_Symbol:
            bound = symbols.setdefault(wanted, size)
            if bound != size:
                raise InputError(
                    f"input {check.name} has size {size} in dimension {axis}; another input has {bound},"
                    f" and both are {wanted}"
                )
            allowed = ranges.get(wanted)
            if allowed is not None and not allowed.lower <= size <= allowed.upper:
                raise InputError(
                    f"input {check.name} has size {size} in dimension {axis}; compiled for"
                    f" {range_text(allowed.lower, allowed.upper)}"
                )


def _check_derived(checks: tuple[Check, ...], flat: list[Any], symbols: dict[Any, int]) -> None:
    for check, value in zip(checks, flat, strict=True):
        if not isinstance(check, TensorCheck) or check.static is not None:
            continue
        for axis, wanted in enumerate(check.shape):
            if isinstance(wanted, int) or wanted.is_Integer or wanted.is_Symbol:
                continue
            expected = wanted.subs(symbols)
            if expected.is_number and int(expected) != value.shape[axis]:
                raise InputError(
                    f"input {check.name} has size {value.shape[axis]} in dimension {axis}; {wanted} is"
                    f" {int(expected)} here"
                )


def checks_of(lowered: Lowered) -> tuple[Check, ...]:
    """The checks of a graph's inputs, in the order of the flattened call."""
    # Inputs are matched by place, since names differ: the model's `input` is `input_1` in the graph.
    nodes = [node for node in lowered.module.graph.nodes if node.op == "placeholder"]
    strides = lowered.module.meta.get("strides", {})
    checks: list[Check] = []
    for item, node in zip(lowered.inputs, nodes, strict=True):
        if item.index is None:
            continue
        value = node.meta.get("val")
        if item.is_constant:
            checks.append(ConstantCheck(item.name, item.constant))
        elif isinstance(value, torch.Tensor):
            checks.append(TensorCheck.of(item.name, value, strides.get(node.name)))
        else:
            checks.append(IntegerCheck(item.name, int(value.node.hint)))
    return tuple(checks)
