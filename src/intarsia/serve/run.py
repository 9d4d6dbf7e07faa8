"""One module run on files: inputs from .npz or .safetensors or at random, outputs to either, and times."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from intarsia.errors import InputError
from intarsia.serve.interface import Interface, Tensors
from intarsia.serve.payload import from_safetensors, to_safetensors


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
