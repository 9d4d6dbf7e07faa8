"""How a captured model is called: which tensors go in, where samples are in them, and what comes out.

`Dim.AUTO` gives every input a symbol of its own, so symbols alone would send a padding mask whole to every
micro-batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from intarsia.errors import InputError, PartitionError
from intarsia.pipeline.gpipe.effects import trial

Dim = int | str  # a fixed length, or the name of a length that may change


@dataclass(frozen=True)
class TensorSpec:
    """One tensor that goes in, comes out, or crosses a border.

    >>> TensorSpec("x", ("s0", 16), torch.float32).bytes({"s0": 4})
    256
    """

    name: str
    shape: tuple[Dim, ...]
    dtype: torch.dtype
    symbols: tuple[Any, ...] = ()  # the sympy expression of each dimension; empty when all are fixed

    def sizes(self, lengths: Mapping[str, int]) -> tuple[int, ...]:
        """The shape with every name replaced by its length."""
        return tuple(self._size(i, lengths) for i in range(len(self.shape)))

    def bytes(self, lengths: Mapping[str, int]) -> int:
        """How many bytes the tensor holds at these lengths."""
        count = 1
        for size in self.sizes(lengths):
            count *= size
        return count * self.dtype.itemsize

    def _size(self, i: int, lengths: Mapping[str, int]) -> int:
        dim = self.shape[i]
        if isinstance(dim, int):
            return dim
        if dim in lengths:
            return lengths[dim]
        expression = self.symbols[i]
        return int(expression.subs({s: lengths[str(s)] for s in expression.free_symbols}))

    def __str__(self) -> str:
        return f"{self.name}: {str(self.dtype).removeprefix('torch.')}{list(self.shape)}".replace("'", "")


def value_name(spec: TensorSpec | str) -> str:
    """The name of a value at a border: a tensor, or a whole number that goes by its name."""
    return spec if isinstance(spec, str) else spec.name


@dataclass(frozen=True)
class Fixed:
    """An input or output that is not a tensor: the capture holds its value."""

    name: str
    value: Any


def tensor_spec(name: str, value: torch.Tensor, same: Mapping[Any, Any] | None = None) -> TensorSpec:
    """Describe a real or fake tensor; `same` puts one symbol for another that always equals it."""
    symbols = tuple(d if isinstance(d, int) else d.node.expr.subs(same or {}) for d in value.shape)
    # An open length that the model turned out to fix is a number by now.
    shape = tuple(int(s) if isinstance(s, int) or s.is_number else str(s) for s in symbols)
    return TensorSpec(name, shape, value.dtype, symbols if any(isinstance(d, str) for d in shape) else ())


@dataclass(frozen=True)
class CallSignature:
    """The calling convention of a captured model, checked at every call."""

    inputs: tuple[TensorSpec | Fixed, ...]
    in_spec: pytree.TreeSpec
    keywords: tuple[str, ...]  # the keyword arguments, in the order of capture
    out_spec: pytree.TreeSpec
    outputs: tuple[TensorSpec | Fixed, ...]
    batch: Dim | None  # the length that micro-batches divide
    ranges: Mapping[str, tuple[int, int]]
    example: Mapping[str, int]  # the lengths at capture
    axes: Mapping[str, int | None] = field(default_factory=dict)  # the batch axis of each input, by name
    same: Mapping[str, str] = field(default_factory=dict)  # lengths that always equal another one
    mixes: str = ""  # why samples cannot be computed apart, if they cannot

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The inputs that are tensors, in order."""
        return tuple(s for s in self.inputs if isinstance(s, TensorSpec))

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> list[torch.Tensor]:
        """The tensors of a call, in order; refuses a call of another form."""
        leaves, spec = pytree.tree_flatten((tuple(args), self._ordered(kwargs or {})))
        if spec != self.in_spec:
            raise InputError(f"the stages were cut for a call of form {self.in_spec}, not {spec}")
        tensors = []
        for leaf, want in zip(leaves, self.inputs, strict=True):
            if isinstance(want, TensorSpec):
                tensors.append(_tensor(want, leaf))
            elif not _same(leaf, want.value):
                raise InputError(f"{want.name}={leaf!r} is not what the stages were cut for: {want.value!r}")
        return tensors

    def lengths(self, tensors: Sequence[torch.Tensor]) -> dict[str, int]:
        """The value of every named length in this call; refuses shapes the capture does not cover."""
        lengths: dict[str, int] = {}
        for want, got in zip(self.tensors, tensors, strict=True):
            for dim, size in zip(want.shape, got.shape, strict=True):
                if isinstance(dim, str) and dim.isidentifier():
                    self._bind(lengths, dim, size, want)
        for want, got in zip(self.tensors, tensors, strict=True):
            if want.sizes(lengths) != tuple(got.shape):
                raise InputError(f"{want.name} has shape {tuple(got.shape)}; the stages were cut for {want}")
        return lengths | {alias: lengths[length] for alias, length in self.same.items()}

    def unflatten(self, tensors: Sequence[Any]) -> Any:
        """The model's answer from the tensors of the last stage."""
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(o, TensorSpec) else o.value for o in self.outputs]
        return pytree.tree_unflatten(leaves, self.out_spec)

    def splits(self, spec: TensorSpec) -> bool:
        """Whether a tensor is divided among micro-batches (the others are given whole to each)."""
        return self.axis(spec) is not None

    def axis(self, spec: TensorSpec) -> int | None:
        """The axis along which a tensor is divided among micro-batches, or None."""
        if self.batch is None:
            return None
        if spec.name in self.axes:
            return self.axes[spec.name]
        places = [i for i, dim in enumerate(spec.shape) if dim == self.batch]
        if isinstance(self.batch, int):
            return 0 if 0 in places else None  # a number may stand elsewhere by chance
        return places[0] if len(places) == 1 else None

    @property
    def least(self) -> int:
        """The fewest samples the capture holds for: of a length of one export makes a case of its own."""
        return self.ranges.get(self.batch, (0, 0))[0] if isinstance(self.batch, str) else 0

    def check_divisible(self) -> None:
        """Raise `PartitionError` where a batch cannot be computed in parts."""
        if self.mixes:
            raise PartitionError(f"the batch cannot be divided into micro-batches: {self.mixes}")

    def _ordered(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        known = {name: kwargs[name] for name in self.keywords if name in kwargs}
        return known | {name: value for name, value in kwargs.items() if name not in known}

    def _bind(self, lengths: dict[str, int], dim: str, size: int, want: TensorSpec) -> None:
        low, high = self.ranges.get(dim, (0, 2**62))
        if not low <= size <= high:
            top = "" if high >= 2**31 else f" to {high}"
            raise InputError(
                f"{want.name} has a length of {size} where the capture holds for {low}{top}"
                f"{' or more' if not top else ''}; split with an example of that length"
            )
        if lengths.setdefault(dim, size) != size:
            raise InputError(f"{want.name} has a length of {size} where another input has {lengths[dim]}")


def _tensor(want: TensorSpec, leaf: Any) -> torch.Tensor:
    if not isinstance(leaf, torch.Tensor):
        raise InputError(f"{want.name} is a {type(leaf).__name__}; the stages were cut for {want}")
    if leaf.dtype != want.dtype or leaf.ndim != len(want.shape):
        kind = f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        raise InputError(f"{want.name} is {kind}; the stages were cut for {want}")
    return leaf


def _same(leaf: Any, value: Any) -> bool:
    if type(leaf) is not type(value):
        return False
    if isinstance(
        value, bool | int | float | complex | str | bytes | type(None) | torch.dtype | torch.device
    ):
        return bool(leaf == value)
    return leaf is value or bool(leaf == value)


Axes = list[int | None]
BatchDims = Mapping[str, Any] | Sequence[Any]
"""By position or by parameter name: an axis, None for a tensor that every micro-batch gets whole, or a pytree
of those. Arguments that are left out are judged by their sizes."""


def longer(tensor: torch.Tensor, axis: int | None, count: int = 1) -> torch.Tensor:
    """A tensor with copies of its last sample; the tensor itself where it holds no samples."""
    if axis is None:
        return tensor
    return torch.cat([tensor, *[tensor.narrow(axis, tensor.shape[axis] - 1, 1)] * count], axis)


def batch_axes(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], batch_dims: BatchDims | None
) -> tuple[Axes, list[bool]]:
    """The batch axis of every leaf of a call, and whether the user said so.

    Unless the user says otherwise, the first tensor's first dimension is the batch, and every tensor whose
    first dimension has that length is divided.
    """
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    stated = [
        _counted(axis, leaf)
        for axis, leaf in zip(_stated(model, args, kwargs, batch_dims), leaves, strict=True)
    ]
    sizes = [
        leaf.shape[0 if axis is _UNSAID else axis]
        for leaf, axis in zip(leaves, stated, strict=True)
        if isinstance(leaf, torch.Tensor) and leaf.ndim and axis is not None
    ]
    axes: Axes = []
    for leaf, axis in zip(leaves, stated, strict=True):
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
    return axes, [axis is not _UNSAID for axis in stated]


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
        longer(v, axis if i != leaf else None) for i, (v, axis) in enumerate(zip(leaves, axes, strict=True))
    ]
    again, options = pytree.tree_unflatten(grown, spec)
    try:
        with trial(model), torch.no_grad():
            model(*again, **options)
    except Exception:  # whatever a model says to a call of the wrong form
        return True
    return False


_UNSAID: Any = object()


def _stated(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], batch_dims: BatchDims | None
) -> list[Any]:
    """What the user said of every leaf."""
    names = list(inspect.signature(model.forward).parameters)
    by_name = isinstance(batch_dims, Mapping)
    known: dict[Any, Any] = (
        dict(batch_dims) if isinstance(batch_dims, Mapping) else dict(enumerate(batch_dims or ()))
    )
    axes: list[Any] = []
    for i, value in enumerate(args):
        key: Any = i if not by_name else names[i] if i < len(names) else None
        axes += _spread(known.pop(key, _UNSAID), value)
    for name, value in kwargs.items():
        axes += _spread(known.pop(name, _UNSAID), value)
    if known:
        raise InputError(f"batch_dims names {', '.join(map(repr, known))}, which the example does not give")
    return axes


def _spread(said: Any, value: Any) -> list[Any]:
    """One axis for every leaf of an argument: the same for all, or a pytree of the argument's own form."""
    leaves, spec = pytree.tree_flatten(value)
    if said is None or said is _UNSAID or isinstance(said, int):
        return [said] * len(leaves)
    axes, form = pytree.tree_flatten(said, is_leaf=lambda v: v is None)
    if len(axes) != len(leaves):
        raise InputError(f"batch_dims gives {form}, but the argument is {spec}")
    return axes
