"""The inputs and outputs of a compiled module by name, also in requests and files."""

from __future__ import annotations

import importlib
import inspect
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from intarsia.archive import load
from intarsia.archive.container import strict_json
from intarsia.capture.object_form import leaf_names
from intarsia.capture.output_objects import Opened, open_objects
from intarsia.errors import InputError
from intarsia.lower.lowered import Role
from intarsia.runtime import Compiled
from intarsia.runtime.call_form import children
from intarsia.runtime.call_interface import ConstantCheck, IntegerCheck, TensorCheck

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


JSON, SAFETENSORS = "application/json", "application/x-safetensors"
_MOST_DIMENSIONS = 32


class Unfit(InputError):
    """The outputs cannot be encoded in the format that the client accepts."""


def decode(body: bytes, kind: str, dtypes: Mapping[str, torch.dtype]) -> Tensors:
    """The inputs in a request's body. Raises InputError for any other body."""
    return _from_json(body, dtypes) if kind == JSON else from_safetensors(body)


def encode(outputs: Mapping[str, Any], kind: str) -> bytes:
    """The outputs as a response's body. Raises Unfit if the format cannot represent them."""
    return _to_json(outputs) if kind == JSON else to_safetensors(outputs)


def _from_json(body: bytes, dtypes: Mapping[str, torch.dtype]) -> Tensors:
    try:
        document = strict_json(body, "; send safetensors for NaN and infinities")
    except ValueError as error:  # no UTF-8, no JSON, or a number with thousands of digits
        raise InputError(f"the body is not JSON: {error}") from None
    inputs = document.get("inputs") if isinstance(document, dict) else None
    if not isinstance(inputs, dict) or len(document) != 1:
        raise InputError('the body must be {"inputs": {name: nested lists of numbers, ...}}')
    for name in inputs:
        if name not in dtypes:
            raise InputError(f"there is no input {name!r}; the inputs are {', '.join(dtypes)}")
    return {name: _tensor(name, value, dtypes[name]) for name, value in inputs.items()}


def _tensor(name: str, value: Any, dtype: torch.dtype) -> torch.Tensor:
    try:
        array = np.array(value)
    except (ValueError, OverflowError, RecursionError):
        raise InputError(f"input {name} is not a nested list of equal lengths") from None
    if array.dtype.kind not in "bifu" or array.ndim > _MOST_DIMENSIONS:
        raise InputError(f"input {name} is not a nested list of numbers of equal lengths")
    if dtype.is_complex:
        raise InputError(f"input {name} is complex, which JSON cannot express; send safetensors")
    dtype_name = str(dtype).removeprefix("torch.")
    kinds = "b" if dtype is torch.bool else "iu" if not dtype.is_floating_point else "ifu"
    if array.size and array.dtype.kind not in kinds:
        raise InputError(f"input {name} must be of {dtype_name}; it has {array.dtype.name}")
    out_of_range = InputError(f"input {name} has a number outside of the range of {dtype_name}")
    if dtype.is_floating_point:
        tensor = torch.from_numpy(array.astype(np.float64)).to(dtype)
        if not bool(torch.isfinite(tensor.double()).all()):
            raise out_of_range
        return tensor
    if array.size and dtype is not torch.bool:
        limits = torch.iinfo(dtype)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            raise out_of_range
    return torch.from_numpy(array.astype(dtype_name))


def from_safetensors(body: bytes) -> Tensors:
    """The tensors in a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return dict(load(body))
    except (SafetensorError, KeyError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"the body is not a safetensors file: {error}") from None


def to_safetensors(outputs: Mapping[str, Any]) -> bytes:
    """Outputs as a safetensors file. Numbers become tensors without dimensions; None is omitted."""
    from safetensors.torch import save

    tensors: Tensors = {}
    for name, value in outputs.items():
        if isinstance(value, torch.Tensor):
            # A copy, since the rows of a batch share its memory.
            tensors[name] = value.clone(memory_format=torch.contiguous_format)
        elif isinstance(value, bool | int | float):
            tensors[name] = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        elif value is not None:
            raise Unfit(
                f"output {name} is a {type(value).__name__}, which safetensors cannot store; accept JSON"
            )
    try:
        return bytes(save(tensors))
    except (KeyError, ValueError) as error:
        raise Unfit(f"the outputs have a dtype that safetensors cannot store ({error})") from None


def _to_json(outputs: Mapping[str, Any]) -> bytes:
    table: dict[str, Any] = {}
    for name, value in outputs.items():
        if not _has_json(value):
            raise Unfit(
                f"output {name} has NaN, infinities or complex numbers, which JSON cannot express;"
                f" accept {SAFETENSORS}"
            )
        table[name] = value.tolist() if isinstance(value, torch.Tensor) else value
    try:
        return json.dumps({"outputs": table}, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise Unfit(f"JSON cannot express the outputs ({error})") from None


def _has_json(value: Any) -> bool:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return bool(torch.isfinite(value.double()).all())
    return not value.is_complex() if isinstance(value, torch.Tensor) else not isinstance(value, complex)


def read(path: Path, interface: Interface) -> Tensors:
    """The inputs in a file. Raises InputError if it is not a file of tensors."""
    if path.suffix == ".safetensors":
        return from_safetensors(path.read_bytes())
    if path.suffix != ".npz":
        raise InputError(f"{path} is neither .npz nor .safetensors")
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise InputError(f"{path} is not a .npz file")
            arrays = {name: file[name] for name in file.files}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    except (ValueError, TypeError, EOFError, KeyError) as error:
        raise InputError(f"{path} is not a .npz file of tensors: {error}") from error


def drawn(interface: Interface, sizes: Mapping[str, int], seed: int) -> Tensors:
    """Random inputs. Dynamic sizes that `sizes` does not name are small; integers are 0 or 1."""
    dynamic = {str(symbol): (symbol, bounds) for symbol, bounds in interface.symbols().items()}
    chosen = interface.usual()
    for name, size in sizes.items():
        if name not in dynamic:
            raise InputError(
                f"there is no dynamic size {name!r}; the dynamic sizes are {', '.join(dynamic) or 'none'}"
            )
        symbol, (low, high) = dynamic[name]
        if not low <= size <= high:
            raise InputError(f"size {name} is {size}; the module was compiled for {low} to {high}")
        chosen[symbol] = size
    return interface.example(chosen, torch.Generator().manual_seed(seed))


def write(path: Path, outputs: Mapping[str, Any]) -> None:
    """Write the outputs that are tensors to a .npz or .safetensors file."""
    if path.suffix == ".safetensors":
        path.write_bytes(to_safetensors(outputs))
        return
    tensors = {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}
    for name, value in tensors.items():
        try:
            value.numpy()
        except TypeError as error:
            raise InputError(
                f"output {name} is {value.dtype}, which numpy does not support; write .safetensors"
            ) from error
    with path.open("wb") as file:
        np.savez(file, **{name: value.numpy() for name, value in tensors.items()})  # type: ignore[arg-type]


def summary(name: str, value: Any) -> str:
    """One line about an output.

    >>> summary("logits", torch.tensor([[0.5, -1.0]]))
    'logits: float32 (1, 2), from -1 to 0.5, mean -0.25'
    """
    if not isinstance(value, torch.Tensor):
        return f"{name}: {value!r}"
    line = f"{name}: {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if not value.numel() or value.is_complex():
        return line
    real = value.double()
    return f"{line}, from {real.min().item():.6g} to {real.max().item():.6g}, mean {real.mean().item():.6g}"
