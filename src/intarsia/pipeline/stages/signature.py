"""The signature of a captured model: its input tensors with their batch axes, and its outputs.

The batch axes are stored, since `Dim.AUTO` gives every input a symbol of its own: by symbols alone, a padding
mask would not be divided among micro-batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from intarsia.errors import InputError, PartitionError, range_text
from intarsia.pipeline.gpipe.effects import trial
from intarsia.runtime.call_form import leaves_of

Dim = int | str  # a fixed length, or the name of a dynamic length


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that is an input, an output, or crosses a border.

    >>> TensorSpec("x", ("s0", 16), torch.float32).bytes({"s0": 4})
    256
    """

    name: str
    shape: tuple[Dim, ...]
    dtype: torch.dtype
    symbols: tuple[Any, ...] = ()  # the sympy expression of each dimension; empty if all are fixed

    def sizes(self, lengths: Mapping[str, int]) -> tuple[int, ...]:
        """The shape with every name replaced by its length."""
        return tuple(self._size(i, lengths) for i in range(len(self.shape)))

    def bytes(self, lengths: Mapping[str, int]) -> int:
        """The bytes of the tensor with these lengths."""
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
        return f"{self.name}: {form_text(self.dtype, self.shape)}".replace("'", "")


def form_text(dtype: torch.dtype, shape: Sequence[Dim]) -> str:
    """A dtype and a shape as text, such as `float32[2, 3]`."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def value_name(spec: TensorSpec | str) -> str:
    """The name of a value at a border: a tensor, or a number, whose spec is its name."""
    return spec if isinstance(spec, str) else spec.name


@dataclass(frozen=True)
class Fixed:
    """An input or output that is not a tensor; the captured graph is valid only for its value."""

    name: str
    value: Any


def shape_of(symbols: Sequence[Any]) -> tuple[Dim, ...]:
    """The shape for sizes of torch.export. If the model fixes a dynamic length, its symbol is a number."""
    return tuple(int(s) if isinstance(s, int) or s.is_number else str(s) for s in symbols)


def tensor_spec(name: str, value: torch.Tensor, same: Mapping[Any, Any] | None = None) -> TensorSpec:
    """The spec of a real or fake tensor; `same` replaces symbols by others that are always equal."""
    symbols = tuple(d if isinstance(d, int) else d.node.expr.subs(same or {}) for d in value.shape)
    shape = shape_of(symbols)
    return TensorSpec(name, shape, value.dtype, symbols if any(isinstance(d, str) for d in shape) else ())


@dataclass(frozen=True)
class CallSignature:
    """The signature of a captured model, which every call is checked against."""

    inputs: tuple[TensorSpec | Fixed, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    outputs: tuple[TensorSpec | Fixed, ...]
    batch: Dim | None  # the length that is divided into micro-batches
    ranges: Mapping[str, tuple[int, int]]
    example: Mapping[str, int]  # the lengths of the example
    axes: Mapping[str, int | None] = field(default_factory=dict)  # the batch axis of each input, by name
    same: Mapping[str, str] = field(default_factory=dict)  # lengths that are always equal to another one
    forward: inspect.Signature | None = None  # of the model
    mixes: str = ""  # why samples depend on each other; empty if they do not

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The inputs that are tensors, in order."""
        return tuple(s for s in self.inputs if isinstance(s, TensorSpec))

    @property
    def results(self) -> tuple[TensorSpec, ...]:
        """The outputs that are tensors, in order."""
        return tuple(s for s in self.outputs if isinstance(s, TensorSpec))

    @property
    def tensor_axes(self) -> list[int | None]:
        """The batch axis of each input that is a tensor; None if it is not divided."""
        return [self.axis(s) for s in self.tensors]

    def samples(self, tensors: Sequence[torch.Tensor]) -> int:
        """The samples of a call; 1 if no tensor is divided. Raises InputError if tensors disagree."""
        triples = zip(self.tensors, tensors, self.tensor_axes, strict=True)
        counts = {spec.name: t.shape[axis] for spec, t, axis in triples if axis is not None}
        first = next(iter(counts), "")
        for name, count in counts.items():
            if count != counts[first]:
                raise InputError(f"{first} has {counts[first]} samples, and {name} {count}")
        return counts.get(first, 1)

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> list[torch.Tensor]:
        """The tensors of a call, in order. Raises InputError for a call of another form."""
        leaves = leaves_of(args, kwargs or {}, self.in_spec, self.forward, "the stages were cut")
        tensors = []
        for leaf, entry in zip(leaves, self.inputs, strict=True):
            if isinstance(entry, TensorSpec):
                tensors.append(_tensor(entry, leaf))
            elif not _same(leaf, entry.value):
                raise InputError(f"{entry.name}={leaf!r}, but the stages were cut for {entry.value!r}")
        return tensors

    def lengths(self, tensors: Sequence[torch.Tensor]) -> dict[str, int]:
        """The value of every named length in this call. Raises InputError for shapes that do not fit."""
        lengths: dict[str, int] = {}
        for spec, tensor in zip(self.tensors, tensors, strict=True):
            for dim, size in zip(spec.shape, tensor.shape, strict=True):
                if isinstance(dim, str) and dim.isidentifier():
                    self._bind(lengths, dim, size, spec)
        for spec, tensor in zip(self.tensors, tensors, strict=True):
            if spec.sizes(lengths) != tuple(tensor.shape):
                shape = tuple(tensor.shape)
                raise InputError(f"{spec.name} has shape {shape}; the stages were cut for {spec}")
        return lengths | {alias: lengths[length] for alias, length in self.same.items()}

    def unflatten(self, tensors: Sequence[Any]) -> Any:
        """The model's outputs, from the tensors of the last stage."""
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(o, TensorSpec) else o.value for o in self.outputs]
        return pytree.tree_unflatten(leaves, self.out_spec)

    def splits(self, spec: TensorSpec) -> bool:
        """Whether a tensor is divided among micro-batches; every micro-batch gets other tensors whole."""
        return self.axis(spec) is not None

    def axis(self, spec: TensorSpec) -> int | None:
        """The axis along which a tensor is divided among micro-batches, or None."""
        if self.batch is None:
            return None
        if spec.name in self.axes:
            return self.axes[spec.name]
        places = [i for i, dim in enumerate(spec.shape) if dim == self.batch]
        if isinstance(self.batch, int):
            return 0 if 0 in places else None  # another axis may have the number by chance
        return places[0] if len(places) == 1 else None

    @property
    def least(self) -> int:
        """The fewest samples that the captured graph allows; export may exclude a length of one."""
        return self.ranges.get(self.batch, (0, 0))[0] if isinstance(self.batch, str) else 0

    def check_divisible(self) -> None:
        """Raise `PartitionError` if a batch cannot be divided into micro-batches."""
        if self.mixes:
            raise PartitionError(f"the batch cannot be divided into micro-batches: {self.mixes}")

    def _bind(self, lengths: dict[str, int], dim: str, size: int, spec: TensorSpec) -> None:
        low, high = self.ranges.get(dim, (0, 2**62))
        if not low <= size <= high:
            raise InputError(
                f"{spec.name} has a length of {size}, but the stages were cut for {range_text(low, high)};"
                " split the model with an example of that length"
            )
        if lengths.setdefault(dim, size) != size:
            raise InputError(f"{spec.name} has a length of {size} where another input has {lengths[dim]}")


def _tensor(spec: TensorSpec, leaf: Any) -> torch.Tensor:
    if not isinstance(leaf, torch.Tensor):
        raise InputError(f"{spec.name} is a {type(leaf).__name__}; the stages were cut for {spec}")
    if leaf.dtype != spec.dtype or leaf.ndim != len(spec.shape):
        form = form_text(leaf.dtype, leaf.shape)
        raise InputError(f"{spec.name} is {form}; the stages were cut for {spec}")
    return leaf


def _same(leaf: Any, value: Any) -> bool:
    if type(leaf) is not type(value):
        return False
    if isinstance(
        value, bool | int | float | complex | str | bytes | type(None) | torch.dtype | torch.device
    ):
        return bool(leaf == value)
    return leaf is value or bool(leaf == value)


def from_front(values: Sequence[torch.Tensor], axes: Sequence[int | None]) -> tuple[torch.Tensor, ...]:
    """Values with the batch in front, in the form that the model takes.

    A tensor that is not divided (its axis is None) has an extra dimension in front.
    """
    return tuple(v[0] if a is None else v.movedim(0, a) for v, a in zip(values, axes, strict=True))


Axes = list[int | None]
BatchDims = Mapping[str, Any] | Sequence[Any]
"""By position or by parameter name: an axis, None for a tensor that is not divided, or a pytree of those. The
sizes of omitted arguments tell their axes."""


def longer(tensor: torch.Tensor, axis: int | None, count: int = 1) -> torch.Tensor:
    """The tensor with `count` copies of its last sample; the tensor itself if it has no batch axis."""
    if axis is None:
        return tensor
    return torch.cat([tensor, *[tensor.narrow(axis, tensor.shape[axis] - 1, 1)] * count], axis)


def batch_axes(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], batch_dims: BatchDims | None
) -> tuple[Axes, list[bool]]:
    """The batch axis of every leaf of a call, and whether the user stated it.

    By default, the batch is the first dimension of the first tensor, and every tensor whose first dimension
    has the same length is divided.
    """
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    stated = [
        _counted(axis, leaf)
        for axis, leaf in zip(_stated(model, args, kwargs, batch_dims), leaves, strict=True)
    ]
    sizes = [
        leaf.shape[0 if axis is _UNSTATED else axis]
        for leaf, axis in zip(leaves, stated, strict=True)
        if isinstance(leaf, torch.Tensor) and leaf.ndim and axis is not None
    ]
    axes: Axes = []
    for leaf, axis in zip(leaves, stated, strict=True):
        if not isinstance(leaf, torch.Tensor) or not leaf.ndim:
            axes.append(None)
        elif axis is _UNSTATED:
            axes.append(0 if sizes and leaf.shape[0] == sizes[0] else None)
        elif axis is not None and leaf.shape[axis] != sizes[0]:
            raise InputError(
                f"batch_dims says that axis {axis} of a tensor of shape {tuple(leaf.shape)} is the batch,"
                f" but the batch has a length of {sizes[0]}"
            )
        else:
            axes.append(axis)
    return axes, [axis is not _UNSTATED for axis in stated]


def _counted(axis: Any, leaf: Any) -> Any:
    """The axis, counted from the front."""
    if axis is None or axis is _UNSTATED or not isinstance(leaf, torch.Tensor):
        return axis
    if axis not in range(-leaf.ndim, leaf.ndim):
        raise InputError(f"batch_dims gives axis {axis} of a tensor of shape {tuple(leaf.shape)}")
    return axis % leaf.ndim


def needs_its_batch(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], axes: Axes, leaf: int
) -> bool:
    """Whether the leaf with number `leaf` must grow with the batch.

    The graph does not tell, for example if the model only indexes the tensor by sample. So the model runs on
    one more sample without a longer leaf. If it runs, the leaf has the length of the batch by chance.
    """
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    grown = [
        longer(v, axis if i != leaf else None) for i, (v, axis) in enumerate(zip(leaves, axes, strict=True))
    ]
    again, options = pytree.tree_unflatten(grown, spec)
    try:
        with trial(model), torch.no_grad():
            model(*again, **options)
    except Exception:  # a model may raise anything for a call of the wrong form
        return True
    return False


_UNSTATED: Any = object()


def _stated(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], batch_dims: BatchDims | None
) -> list[Any]:
    """The stated axis of every leaf, or `_UNSTATED`."""
    names = list(inspect.signature(model.forward).parameters)
    by_name = isinstance(batch_dims, Mapping)
    dims: dict[Any, Any] = (
        dict(batch_dims) if isinstance(batch_dims, Mapping) else dict(enumerate(batch_dims or ()))
    )
    axes: list[Any] = []
    for i, value in enumerate(args):
        key: Any = i if not by_name else names[i] if i < len(names) else None
        axes += _leaf_axes(dims.pop(key, _UNSTATED), value)
    for name, value in kwargs.items():
        axes += _leaf_axes(dims.pop(name, _UNSTATED), value)
    if dims:
        raise InputError(f"batch_dims names {', '.join(map(repr, dims))}, which the example does not have")
    return axes


def _leaf_axes(stated: Any, value: Any) -> list[Any]:
    """The axis of every leaf of an argument; `stated` is one axis for all, or a pytree like the argument."""
    leaves, spec = pytree.tree_flatten(value)
    if stated is None or stated is _UNSTATED or isinstance(stated, int):
        return [stated] * len(leaves)
    axes, form = pytree.tree_flatten(stated, is_leaf=lambda v: v is None)
    if len(axes) != len(leaves):
        raise InputError(f"batch_dims has the form {form}, but the argument is {spec}")
    return axes
