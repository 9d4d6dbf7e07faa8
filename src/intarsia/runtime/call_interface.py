"""The interface of a compiled module: how a call maps to the inputs of its graph.

Every call is checked against the structure, shapes, dtypes and devices it was compiled for.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from intarsia.capture.size_guards import check_guards, read_guards
from intarsia.errors import InputError, range_text
from intarsia.lower import Lowered
from intarsia.runtime.call_form import children, is_same, leaves_of, shown

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
        return leaves_of(args, kwargs, self.lowered.in_spec, self.signature)


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
                raise InputError(f"input {check.name} must be an integer, not {shown(value)}")
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
    if is_same(value, check.value) or (is_alike and type(value) is not float and value == check.value):
        return
    varies = is_alike and type(value) is int
    advice = "; to let it vary, compile with dynamic_shapes that has Dim.DYNAMIC for it" if varies else ""
    raise InputError(f"input {check.name} is {shown(value)}; compiled for {check.value!r}{advice}")


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
