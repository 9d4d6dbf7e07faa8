"""Tensors on the wire and in files: JSON numbers, safetensors or .npz; drawn at random, or in a line."""

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
    """The answer has no form in what the client accepts."""


def decode(body: bytes, kind: str, dtypes: Mapping[str, torch.dtype]) -> Tensors:
    """The inputs in a request's body; InputError, in a sentence, for anything else."""
    return _from_json(body, dtypes) if kind == JSON else from_safetensors(body)


def encode(outputs: Mapping[str, Any], kind: str) -> bytes:
    """An answer as a body; Unfit where it cannot be written there."""
    return _to_json(outputs) if kind == JSON else to_safetensors(outputs)


def _from_json(body: bytes, dtypes: Mapping[str, torch.dtype]) -> Tensors:
    try:
        document = strict_json(body, "; send safetensors for NaN and infinities")
    except ValueError as error:  # no UTF-8, no JSON, a number of thousands of digits
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
    wanted = "b" if dtype is torch.bool else "iu" if not dtype.is_floating_point else "ifu"
    if array.size and array.dtype.kind not in wanted:
        raise InputError(f"input {name} must be of {_said(dtype)}; it holds {array.dtype.name}")
    if dtype.is_floating_point:
        tensor = torch.from_numpy(array.astype(np.float64)).to(dtype)
        if not bool(torch.isfinite(tensor.double()).all()):
            raise InputError(f"input {name} holds a number that {_said(dtype)} cannot")
        return tensor
    if array.size and dtype is not torch.bool:
        limits = torch.iinfo(dtype)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            raise InputError(f"input {name} holds a number that {_said(dtype)} cannot")
    return torch.from_numpy(array.astype(_said(dtype)))


def _said(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def from_safetensors(body: bytes) -> Tensors:
    """The tensors in a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return dict(load(body))
    except (SafetensorError, KeyError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"the body is not a safetensors file: {error}") from None


def to_safetensors(outputs: Mapping[str, Any]) -> bytes:
    """Tensors, and numbers as tensors of no dimension; None is left out."""
    from safetensors.torch import save

    tensors: Tensors = {}
    for name, value in outputs.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value.clone(
                memory_format=torch.contiguous_format
            )  # rows of a batch share its memory
        elif isinstance(value, bool | int | float):
            tensors[name] = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        elif value is not None:
            raise Unfit(
                f"output {name} is a {type(value).__name__}, which safetensors cannot hold; ask for JSON"
            )
    try:
        return bytes(save(tensors))
    except (KeyError, ValueError) as error:
        raise Unfit(f"the outputs have a dtype that safetensors cannot hold ({error})") from None


def _to_json(outputs: Mapping[str, Any]) -> bytes:
    table: dict[str, Any] = {}
    for name, value in outputs.items():
        if not _has_json(value):
            raise Unfit(
                f"output {name} holds NaN, infinities or complex numbers, for which JSON has none;"
                f" ask for {SAFETENSORS}"
            )
        table[name] = value.tolist() if isinstance(value, torch.Tensor) else value
    try:
        return json.dumps({"outputs": table}, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise Unfit(f"the outputs have no form in JSON ({error})") from None


def _has_json(value: Any) -> bool:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return bool(torch.isfinite(value.double()).all())
    return not value.is_complex() if isinstance(value, torch.Tensor) else not isinstance(value, complex)


def read(path: Path, interface: Interface) -> Tensors:
    """The inputs in a file; InputError, in a sentence, if it holds none."""
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
    """Random inputs; sizes that vary are given by name, or small. Whole numbers are 0 or 1."""
    known = {str(symbol): (symbol, bounds) for symbol, bounds in interface.symbols().items()}
    chosen = interface.usual()
    for name, size in sizes.items():
        if name not in known:
            raise InputError(f"there is no size {name!r}; those that vary are {', '.join(known) or 'none'}")
        symbol, (low, high) = known[name]
        if not low <= size <= high:
            raise InputError(f"size {name} is {size}; compiled for {low} to {high}")
        chosen[symbol] = size
    return interface.example(chosen, torch.Generator().manual_seed(seed))


def write(path: Path, outputs: Mapping[str, Any]) -> None:
    """Outputs that are tensors, to a file of the kind its name says."""
    if path.suffix == ".safetensors":
        path.write_bytes(to_safetensors(outputs))
        return
    tensors = {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}
    for name, value in tensors.items():
        try:
            value.numpy()
        except TypeError as error:
            raise InputError(
                f"output {name} is {value.dtype}, which numpy has not; write .safetensors"
            ) from error
    with path.open("wb") as file:
        np.savez(file, **{name: value.numpy() for name, value in tensors.items()})  # type: ignore[arg-type]


def summary(name: str, value: Any) -> str:
    """An output in a line.

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
