"""Which tensors of a call hold one entry for each sample, and along which axis.

`Dim.AUTO` gives every input a symbol of its own, so symbols alone would send a padding mask whole to every
micro-batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from intarsia.errors import InputError
from intarsia.pipeline.stages.trial import trial

Axes = list[int | None]
BatchDims = Mapping[str, Any] | Sequence[Any]
"""By position or by parameter name: an axis, None for a tensor that every micro-batch gets whole, or a pytree
of those. Arguments that are left out are judged by their sizes."""


def batch_axes(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], given: BatchDims | None
) -> tuple[Axes, list[bool]]:
    """The batch axis of every leaf of a call, and whether the user said so.

    Unless the user says otherwise, the first tensor's first dimension is the batch, and every tensor whose
    first dimension has that length is divided.
    """
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    told = [
        _counted(axis, leaf) for axis, leaf in zip(_told(model, args, kwargs, given), leaves, strict=True)
    ]
    sizes = [
        leaf.shape[0 if axis is _UNSAID else axis]
        for leaf, axis in zip(leaves, told, strict=True)
        if isinstance(leaf, torch.Tensor) and leaf.ndim and axis is not None
    ]
    axes: Axes = []
    for leaf, axis in zip(leaves, told, strict=True):
        if not isinstance(leaf, torch.Tensor) or not leaf.ndim:
            axes.append(None)
        elif axis is _UNSAID:
            axes.append(0 if sizes and leaf.shape[0] == sizes[0] else None)
        elif axis is not None and leaf.shape[axis] != sizes[0]:
            raise InputError(
                f"batch_dims says that axis {axis} of a tensor of shape {tuple(leaf.shape)} is the batch,"
                f" but the batch has a length of {sizes[0]}"
            )
        else:
            axes.append(axis)
    return axes, [axis is not _UNSAID for axis in told]


def _counted(axis: Any, leaf: Any) -> Any:
    """An axis counted from the front."""
    if axis is None or axis is _UNSAID or not isinstance(leaf, torch.Tensor):
        return axis
    if axis not in range(-leaf.ndim, leaf.ndim):
        raise InputError(f"batch_dims gives axis {axis} of a tensor of shape {tuple(leaf.shape)}")
    return axis % leaf.ndim


def needs_its_batch(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], axes: Axes, leaf: int
) -> bool:
    """Whether leaf number `leaf` must grow with the batch: the model is run with one more sample without it.

    The graph does not tell where the model only indexes a tensor by sample. If the larger batch runs with the
    tensor as it is, its length equals the batch's by chance.
    """
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    grown = [
        torch.cat([v, v.narrow(axis, 0, 1)], axis) if axis is not None and i != leaf else v
        for i, (v, axis) in enumerate(zip(leaves, axes, strict=True))
    ]
    again, options = pytree.tree_unflatten(grown, spec)
    try:
        with trial(model), torch.no_grad():
            model(*again, **options)
    except Exception:  # whatever a model says to a call of the wrong form
        return True
    return False


_UNSAID: Any = object()


def _told(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], given: BatchDims | None
) -> list[Any]:
    """What the user said of every leaf."""
    names = list(inspect.signature(model.forward).parameters)
    by_name = isinstance(given, Mapping)
    known: dict[Any, Any] = dict(given) if isinstance(given, Mapping) else dict(enumerate(given or ()))
    told: list[Any] = []
    for i, value in enumerate(args):
        key: Any = i if not by_name else names[i] if i < len(names) else None
        told += _spread(known.pop(key, _UNSAID), value)
    for name, value in kwargs.items():
        told += _spread(known.pop(name, _UNSAID), value)
    if known:
        raise InputError(f"batch_dims names {', '.join(map(repr, known))}, which the example does not give")
    return told


def _spread(said: Any, value: Any) -> list[Any]:
    """One axis for every leaf of an argument: the same for all, or a pytree of the argument's own form."""
    leaves, spec = pytree.tree_flatten(value)
    if said is None or said is _UNSAID or isinstance(said, int):
        return [said] * len(leaves)
    axes, form = pytree.tree_flatten(said, is_leaf=lambda v: v is None)
    if len(axes) != len(leaves):
        raise InputError(f"batch_dims gives {form}, but the argument is {spec}")
    return axes
