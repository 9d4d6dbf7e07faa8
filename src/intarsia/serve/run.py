"""One module run on files: inputs from .npz or .safetensors or at random, outputs to either, and times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from intarsia.errors import InputError
from intarsia.serve.interface import Interface, Tensors
from intarsia.serve.payload import from_safetensors, to_safetensors


@dataclass(frozen=True)
class Options:
    """What `intarsia serve` takes besides the file."""

    host: str = "127.0.0.1"
    port: int = 8000
    max_batch: int = 32  # rows; 1 switches batching off
    wait_ms: float = 2.0  # a request waits so long at most for others to share its call
    queue: int = 256  # requests taken and not answered; beyond, 503
    max_body: int = 64 * 2**20  # bytes of a request
    max_held: int = 512 * 2**20  # bytes of all requests taken and not answered; beyond, 503
    read_s: float = 30.0  # a client may take so long to send a request
    answer_s: float = 60.0  # a request that has no answer then gets 504
    linger_s: float = 1.0  # after SIGTERM, requests are refused in words for so long before the door is shut
    stop_s: float = 30.0  # after SIGTERM, requests that were taken may take so long
    workers: int = 1  # processes
    connections: int = 1000  # open at once; beyond, uvicorn's 503
    imports: tuple[str, ...] = ()  # modules that define types or operators of the file

    def __post_init__(self) -> None:
        for name in ("max_batch", "queue", "max_body", "max_held", "workers", "connections"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; at least 1 is needed")
        for name in ("wait_ms", "linger_s"):
            if not 0 <= getattr(self, name) < 1e6:
                raise InputError(f"{name} is {getattr(self, name)}; at least 0 is needed")
        for name in ("read_s", "answer_s", "stop_s"):
            if not 0 < getattr(self, name) < 1e6:
                raise InputError(f"{name} is {getattr(self, name)}; more than 0 is needed")


def read(path: Path, interface: Interface) -> Tensors:
    """The inputs in a file; InputError, in a sentence, if it holds none."""
    if path.suffix == ".safetensors":
        return from_safetensors(path.read_bytes())
    if path.suffix != ".npz":
        raise InputError(f"{path} is neither .npz nor .safetensors")
    try:
        with np.load(path, allow_pickle=False) as found:
            if not isinstance(found, np.lib.npyio.NpzFile):
                raise InputError(f"{path} is not a .npz file")
            arrays = {name: found[name] for name in found.files}
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
