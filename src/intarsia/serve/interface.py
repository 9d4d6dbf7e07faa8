"""The inputs and outputs of a compiled module, by name."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from intarsia.archive import load
from intarsia.capture.object_form import leaf_names
from intarsia.capture.output_objects import Opened, open_objects
from intarsia.errors import InputError
from intarsia.lower.lowered import Role
from intarsia.runtime import Compiled
from intarsia.runtime.call_interface import ConstantCheck, IntegerCheck, TensorCheck, children

Tensors = dict[str, torch.Tensor]


def load_interface(path: str | os.PathLike[str], imports: Sequence[str] = ()) -> Interface:
    """The interface of a saved module. `imports` are modules that define its types or operators."""
    for name in imports:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise InputError(f"{name} cannot be imported: {error}") from error
    return Interface.of(load(path))


@dataclass(frozen=True)
class Interface:
    """A module with the names of its inputs and outputs. Nested values have names like `pair.a`."""

    compiled: Compiled
    inputs: Mapping[str, TensorCheck]
    outputs: tuple[str, ...]
    stateful: bool  # whether a call changes buffers or its inputs
    _order: tuple[str | ConstantCheck, ...]

    @staticmethod
    def of(compiled: Compiled) -> Interface:
        """The interface of a module. Integer arguments have the values of the example."""
        lowered = compiled.lowered
        names = _input_names(lowered.in_spec, compiled.call_signature)
        inputs: dict[str, TensorCheck] = {}
        order: list[str | ConstantCheck] = []
        for name, check in zip(names, compiled.checks, strict=True):
            if isinstance(check, IntegerCheck):  # only tensors can be passed
                check = ConstantCheck(check.name, check.example)
            if isinstance(check, ConstantCheck):
                order.append(check)
                continue
            inputs[name] = check
            order.append(name)
        roles = [output.role for output in lowered.outputs]
        outputs = tuple(_names(lowered.out_spec)) if not lowered.out_spec.is_leaf() else ("output",)
        return Interface(compiled, inputs, outputs, any(r is not Role.USER for r in roles), tuple(order))

    def prepared(self, tensors: Mapping[str, torch.Tensor]) -> list[Any]:
        """The flat arguments for these inputs. Raises InputError if they do not fit."""
        names = ", ".join(self.inputs)
        for name in tensors:
            if name not in self.inputs:
                raise InputError(f"there is no input {name!r}; the inputs are {names}")
        missing = [name for name in self.inputs if name not in tensors]
        if missing:
            raise InputError(f"input {missing[0]} is missing; the inputs are {names}")
        flat = [
            item.value if isinstance(item, ConstantCheck) else self._input(item, tensors)
            for item in self._order
        ]
        self.compiled.check(flat)
        return flat

    def run(self, flat: Sequence[Any]) -> dict[str, Any]:
        """Call the module. Returns its outputs by name, with tensors on the CPU."""
        args, kwargs = pytree.tree_unflatten(list(flat), self.compiled.lowered.in_spec)
        result = open_objects(self.compiled(*args, **kwargs))
        leaves = pytree.tree_leaves(result, is_leaf=lambda value: value is None)
        return {
            name: value.detach().cpu() if isinstance(value, torch.Tensor) else value
            for name, value in zip(self.outputs, leaves, strict=True)
        }

    def call(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Check inputs by name, and call the module with them."""
        return self.run(self.prepared(tensors))

    def _input(self, name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """An input on its device; if the model reads strides, with the strides of the example."""
        check, value = self.inputs[name], tensors[name].to(self.inputs[name].device)
        if check.strides is None or value.dim() != len(check.strides):
            return value
        return torch.empty_strided(value.shape, check.strides, dtype=value.dtype, device=value.device).copy_(
            value
        )

    def describe(self) -> dict[str, Any]:
        """Names, dtypes and shapes, with the ranges of dynamic sizes; plain values for JSON."""
        ranges = self.compiled.lowered.range_constraints
        return {
            "inputs": {
                name: {
                    "dtype": str(check.dtype).removeprefix("torch."),
                    "shape": [_size(d, ranges) for d in check.shape],
                }
                for name, check in self.inputs.items()
            },
            "outputs": list(self.outputs),
        }

    def example(self, sizes: Mapping[Any, int], random: torch.Generator | None = None) -> Tensors:
        """Inputs with these sizes of symbols: zeros, or random numbers (0 and 1 for integers)."""
        tensors: Tensors = {}
        for name, check in self.inputs.items():
            shape = [size if isinstance(size, int) else int(size.subs(dict(sizes))) for size in check.shape]
            if random is None:
                tensors[name] = torch.zeros(shape, dtype=check.dtype)
            elif check.dtype.is_floating_point or check.dtype.is_complex:
                kind = torch.complex64 if check.dtype.is_complex else torch.float32
                tensors[name] = torch.randn(shape, generator=random, dtype=kind).to(check.dtype)
            else:
                tensors[name] = torch.randint(0, 2, shape, generator=random).to(check.dtype)
        return tensors

    def symbols(self) -> dict[Any, tuple[int, int]]:
        """Every dynamic size, with its least and its largest value (2**31 - 1 without a limit)."""
        ranges = self.compiled.lowered.range_constraints
        symbols = {
            s for check in self.inputs.values() for d in check.shape for s in getattr(d, "free_symbols", ())
        }
        return {symbol: _bounds(ranges.get(symbol)) for symbol in sorted(symbols, key=str)}

    def usual(self) -> dict[Any, int]:
        """A small value for every dynamic size."""
        return {symbol: min(max(low, 4), high) for symbol, (low, high) in self.symbols().items()}


_LARGEST = 2**31 - 1


def _bounds(limits: Any) -> tuple[int, int]:
    if limits is None:
        return 0, _LARGEST
    return int(max(limits.lower, 0)), int(min(limits.upper, _LARGEST))


def _size(size: Any, ranges: Mapping[Any, Any]) -> Any:
    if isinstance(size, int) or size.is_Integer:
        return int(size)
    if not size.is_Symbol:
        return str(size)
    low, high = _bounds(ranges.get(size))
    return f"{size}: {low} to {high}" if high < _LARGEST else f"{size}: from {low}"


def _input_names(spec: pytree.TreeSpec, signature: inspect.Signature | None) -> list[str]:
    args, kwargs = children(spec)
    positional = [p.name for p in signature.parameters.values() if p.kind in _POSITIONAL] if signature else []
    count = len(children(args))
    named = [*positional[:count], *(str(i) for i in range(len(positional), count))]
    names = []
    for name, child in zip([*named, *kwargs.context], [*children(args), *children(kwargs)], strict=True):
        names += [_joined(name, inner) for inner in _names(child)]
    return names


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _names(spec: pytree.TreeSpec) -> list[str]:
    """A name for every leaf: its keys, fields or positions, joined by dots."""
    if spec.is_leaf():
        return [""]
    below = children(spec)
    return [
        _joined(key, inner)
        for key, child in zip(_keys(spec, below), below, strict=True)
        for inner in _names(child)
    ]


def _keys(spec: pytree.TreeSpec, below: Sequence[pytree.TreeSpec]) -> list[str]:
    context = spec.context
    if spec.type is Opened:
        return leaf_names(context)
    if isinstance(context, list | tuple) and context and isinstance(context[0], list):
        context = context[0]  # a registered dataclass: its fields, then the fields that are None
    if isinstance(context, list | tuple) and len(context) == len(below):
        return [str(key) for key in context]
    fields = getattr(context, "_fields", None)  # of a named tuple
    return list(fields) if fields is not None else [str(i) for i in range(len(below))]


def _joined(outer: str, inner: str) -> str:
    return f"{outer}.{inner}" if inner else outer
