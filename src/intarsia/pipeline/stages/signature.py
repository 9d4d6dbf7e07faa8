"""How a captured model is called: which tensors go in, in what shapes, and how the answer is put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from intarsia.errors import InputError, PartitionError

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
        found: dict[str, int] = {}
        for want, got in zip(self.tensors, tensors, strict=True):
            for dim, size in zip(want.shape, got.shape, strict=True):
                if isinstance(dim, str) and dim.isidentifier():
                    self._bind(found, dim, size, want)
        for want, got in zip(self.tensors, tensors, strict=True):
            if want.sizes(found) != tuple(got.shape):
                raise InputError(f"{want.name} has shape {tuple(got.shape)}; the stages were cut for {want}")
        return found | {alias: found[length] for alias, length in self.same.items()}

    def unflatten(self, tensors: Sequence[Any]) -> Any:
        """The model's answer from the tensors of the last stage."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(o, TensorSpec) else o.value for o in self.outputs]
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
        found = [i for i, dim in enumerate(spec.shape) if dim == self.batch]
        if isinstance(self.batch, int):
            return 0 if 0 in found else None  # a number may stand elsewhere by chance
        return found[0] if len(found) == 1 else None

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

    def _bind(self, found: dict[str, int], dim: str, size: int, want: TensorSpec) -> None:
        low, high = self.ranges.get(dim, (0, 2**62))
        if not low <= size <= high:
            top = "" if high >= 2**31 else f" to {high}"
            raise InputError(
                f"{want.name} has a length of {size} where the capture holds for {low}{top}"
                f"{' or more' if not top else ''}; split with an example of that length"
            )
        if found.setdefault(dim, size) != size:
            raise InputError(f"{want.name} has a length of {size} where another input has {found[dim]}")


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
