"""A call of a model, and copies of it: capture must not take two inputs for one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

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
