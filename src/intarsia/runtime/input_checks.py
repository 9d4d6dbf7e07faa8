"""The door of a compiled module: a call is matched to the shapes, dtypes and devices compiled for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from intarsia.errors import InputError

if TYPE_CHECKING:  # sizes that vary come with sympy's symbols; where none does, it is not imported
    import sympy

    from intarsia.lower import Lowered

FixedInput = tuple[torch.dtype, torch.Size, torch.device]


@dataclass(frozen=True)
class TensorCheck:
    """What one input must be; `shape` holds sizes, or symbols to be bound or compared."""

    name: str
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int | sympy.Expr, ...]
    static: torch.Size | None
    strides: tuple[int, ...] | None = None  # where the model reads this input by its strides

    @staticmethod
    def of(name: str, value: torch.Tensor, strides: tuple[int, ...] | None = None) -> TensorCheck:
        shape = tuple(size if isinstance(size, int) else size.node.expr for size in value.shape)
        static = torch.Size(shape) if all(isinstance(size, int) for size in shape) else None
        return TensorCheck(name, value.dtype, value.device, shape, static, strides)


@dataclass(frozen=True)
class ConstantCheck:
    """An input that was a plain value when the model was compiled, and is part of it now."""

    name: str
    value: Any


Check = TensorCheck | ConstantCheck | None


def check_inputs(checks: tuple[Check, ...], flat: list[Any], ranges: Mapping[Any, Any]) -> None:
    """Raise InputError, naming the input, unless the call fits."""
    symbols: dict[Any, int] | None = None
    for check, value in zip(checks, flat, strict=True):
        if check.__class__ is not TensorCheck:
            if isinstance(check, ConstantCheck):
                _check_constant(check, value)
            continue
        if value.__class__ is not torch.Tensor and not isinstance(value, torch.Tensor):
            raise InputError(f"input {check.name} must be a tensor, not a {type(value).__name__}")
        if value.dtype is not check.dtype:
            raise InputError(f"input {check.name} has dtype {value.dtype}; compiled for {check.dtype}")
        if value.device != check.device:
            raise InputError(f"input {check.name} is on {value.device}; compiled for {check.device}")
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
    same = value is check.value or (type(value) is type(check.value) and value == check.value)
    if not same:
        raise InputError(f"input {check.name} is {value!r}; compiled for {check.value!r}")


def _bind(
    check: TensorCheck, value: torch.Tensor, symbols: dict[Any, int], ranges: Mapping[Any, Any]
) -> None:
    shape = tuple(value.shape)
    if len(shape) != len(check.shape):
        raise InputError(f"input {check.name} has {len(shape)} dimensions; compiled for {len(check.shape)}")
    for axis, (size, wanted) in enumerate(zip(shape, check.shape, strict=True)):
        if isinstance(wanted, int) or wanted.is_Integer:  # a size the model fixed, asked for or not
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
                    f" {allowed.lower} to {allowed.upper}"
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
    """What each input that a caller gives must be."""
    # By place, not by name: a graph calls an input `input_1` that its model calls `input`.
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
            checks.append(None)
    return tuple(checks)


def fixed_inputs(checks: tuple[Check, ...]) -> list[FixedInput] | None:
    """Dtype, shape and device of every input, if all are tensors of fixed shape."""
    quick = []
    for check in checks:
        if not isinstance(check, TensorCheck) or check.static is None or check.strides is not None:
            return None
        quick.append((check.dtype, check.static, check.device))
    return quick
