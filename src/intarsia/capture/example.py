"""A call of a model: copies of it (capture must not take two inputs for one), its device and autocast."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from intarsia.errors import InputError

Call = tuple[Sequence[Any], Mapping[str, Any]]  # the arguments of a model by place and by name


def bound_arguments(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments | None:
    """The arguments of a call by the names of the model's `forward`.

    None where `forward` does not take them, or has no signature, as in TorchScript: capture says so.
    """
    try:
        return inspect.signature(model.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return None


def named_arguments(bound: inspect.BoundArguments) -> dict[str, Any]:
    """The arguments of a call by name: those that a **parameter takes have the names of the call."""
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        takes_rest = bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        named |= value if takes_rest else {name: value}
    return named


def distinct_inputs(
    model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with a copy of every tensor that occurs twice in it, or is the model's own.

    Export knows tensors by identity: `(q, q, q)` would become a graph with one input, and a buffer of the
    model given as an input would stay that buffer for good.

    >>> x = torch.ones(2)
    >>> (a, b), _ = distinct_inputs(None, (x, x), {})
    >>> a is x, b is x
    (True, False)
    """
    known = set(map(id, _tensors_of(model))) if isinstance(model, nn.Module) else set()
    flat, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    for place, value in enumerate(flat):
        if not isinstance(value, torch.Tensor):
            continue
        if id(value) in known:
            flat[place] = fresh_copy(value)
        known.add(id(value))
    call: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(flat, structure)
    return call


def fresh_copy(value: torch.Tensor) -> torch.Tensor:
    """A new tensor with the same values, strides and `requires_grad`; expanded dimensions stay so."""
    source = value.detach()
    if source.layout is torch.strided and not source.is_nested:  # a nested tensor has no strides
        expanded = [axis for axis, step in enumerate(source.stride()) if step == 0 and source.shape[axis] > 1]
        for axis in expanded:
            source = source.narrow(axis, 0, 1)
        copy = source.clone().expand(value.shape) if expanded else source.clone()
    else:
        copy = source.clone()
    return copy.requires_grad_(value.requires_grad)


def copied_call(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with every tensor copied, once: what is one tensor twice stays one."""
    copies: dict[int, torch.Tensor] = {}

    def copied(value: torch.Tensor) -> torch.Tensor:
        if id(value) not in copies:
            copies[id(value)] = fresh_copy(value)
        return copies[id(value)]

    args, kwargs = call
    copy: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(
        torch.Tensor, copied, (tuple(args), dict(kwargs))
    )
    return copy


def is_transformed(call: Call) -> bool:
    """Whether a call is made inside a transform of `torch.func`: its tensors live only as long as that."""
    # Private; without it no call counts as one of a transform. tests/faults/test_own_errors.py watches it.
    wrapped = getattr(getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", lambda _: False)
    leaves = pytree.tree_leaves((tuple(call[0]), dict(call[1])))
    return any(isinstance(leaf, torch.Tensor) and wrapped(leaf) for leaf in leaves)


def _tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """Parameters, buffers, and tensors kept as plain attributes."""
    plain = [v for module in model.modules() for v in vars(module).values() if isinstance(v, torch.Tensor)]
    return [*model.parameters(), *model.buffers(), *plain]


# The device that a call runs on, and autocast around it, which a compiled module cannot follow.


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
