"""Tensors in requests and files: JSON, safetensors or .npz; random inputs, and summaries of outputs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from intarsia.archive.container import strict_json
from intarsia.errors import InputError
from intarsia.serve.interface import Interface, Tensors

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
