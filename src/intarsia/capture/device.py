"""The device that a call runs on, and autocast around it, which a compiled module cannot follow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from intarsia.errors import InputError


def device_kind(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The kind of device a call runs on, such as `cuda`; a few tensors on the CPU do not make it the CPU.

    >>> device_kind(nn.Linear(2, 2), (torch.ones(1, 2),), {})
    'cpu'
    """
    kinds = [tensor.device.type for tensor in _tensors(model, args, kwargs)]
    return next((kind for kind in kinds if kind not in ("cpu", "meta")), "cpu")


def device_of(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """A context in which the GPU that a call runs on is the current one: engines build for that."""
    devices = (tensor.device for tensor in _tensors(model, args, kwargs) if tensor.is_cuda)
    device = next(devices, None)
    return nullcontext() if device is None else torch.cuda.device(device)


def _tensors(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for value in pytree.tree_leaves((tuple(args), dict(kwargs))):
        if isinstance(value, torch.Tensor):
            yield value
    if isinstance(model, nn.Module):
        yield from model.parameters()
        yield from model.buffers()
    elif isinstance(model, ExportedProgram):
        yield from (value for value in model.state_dict.values() if isinstance(value, torch.Tensor))


def refuse_autocast(kind: str) -> None:
    """InputError if autocast is on around compiling for a kind of device: it would not be there at calls."""
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
        raise InputError(
            f"{_written(kind)} is on while compiling; use it inside the model's"
            " forward instead, where it is compiled, too"
        )


def under_autocast(kind: str) -> str:
    """The message for a call under an autocast that the model was compiled without."""
    return (
        f"{_written(kind)} is on around this call, and the model itself answers differently under it; write"
        " it into the model's forward and compile it, or call the compiled module under"
        f" torch.autocast({kind!r}, enabled=False)"
    )


def _written(kind: str) -> str:
    return f"torch.autocast({kind!r}, {torch.get_autocast_dtype(kind)})"
