"""Micro-batches: `scatter` cuts a mini-batch into them, and `gather` joins them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, overload

import torch
import torch.utils._pytree as pytree
from torch import Tensor

Tensors: TypeAlias = tuple[Tensor, ...]
TensorOrTensors: TypeAlias = Tensor | Tensors

# The types beside tensors in a mini-batch; every micro-batch gets the same value.
CONSTANTS = (type(None), bool, int, float, complex)


class Batch:
    """One micro-batch: a tensor (it is then *atomic*) or a tree of tensors and constants.

    As a sequence, it consists of its tensors, in the order of the tree. They can be replaced.

    >>> batch = Batch((torch.zeros(2), torch.ones(2)))
    >>> batch.atomic, len(batch), batch[1].tolist()
    (False, 2, [1.0, 1.0])
    """

    def __init__(self, value: Any) -> None:
        self.atomic: bool = isinstance(value, Tensor)
        if self.atomic:
            self._tensors: list[Tensor] = [value]
            return
        leaves, self._spec = pytree.tree_flatten(value)
        self._tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # Constants by position. The other positions are tensors, so a constant may also be None.
        self._constants = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
        self._tuple = type(value) is tuple and all(isinstance(x, Tensor) for x in value)

    @property
    def tensor(self) -> Tensor:
        """The tensor of an atomic batch."""
        if not self.atomic:
            raise AttributeError("the batch is not atomic: it holds a tree, not one tensor")
        return self._tensors[0]

    @property
    def tensors(self) -> Tensors:
        """The tensors of a batch that is not atomic."""
        if self.atomic:
            raise AttributeError("the batch is atomic: it holds one tensor, not a tree")
        return tuple(self._tensors)

    @property
    def value(self) -> Any:
        """The tensor or the tree, with the present tensors."""
        if self.atomic:
            return self._tensors[0]
        if self._tuple:
            return tuple(self._tensors)
        tensors = iter(self._tensors)
        count = len(self._tensors) + len(self._constants)
        leaves = [self._constants[i] if i in self._constants else next(tensors) for i in range(count)]
        return pytree.tree_unflatten(leaves, self._spec)

    def rebuild(self, tensors: Tensors) -> Any:
        """The value this batch would have with other tensors."""
        twin = self.copy()
        twin[:] = tensors
        return twin.value

    def copy(self) -> Batch:
        """A batch that can be changed without changing this one; the tensors are the same."""
        twin = object.__new__(Batch)
        twin.__dict__ = dict(self.__dict__, _tensors=list(self._tensors))
        return twin

    def call(self, function: Callable[[Any], Any]) -> Batch:
        """The batch that a function returns for this one."""
        return Batch(function(self.value))

    @property
    def carrier(self) -> int | None:
        """The position of the first tensor that can have a gradient, and so order the backward pass."""
        for position, tensor in enumerate(self._tensors):
            if tensor.is_floating_point() or tensor.is_complex():
                return position
        return None

    def __repr__(self) -> str:
        return f"Batch[atomic={self.atomic!r}]({self.value!r})"

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Tensors: ...
    def __getitem__(self, index: int | slice) -> Tensor | Tensors:
        chosen = self._tensors[index]
        return chosen if isinstance(chosen, Tensor) else tuple(chosen)

    def __setitem__(self, index: int | slice, value: TensorOrTensors) -> None:
        tensors = list(self._tensors)
        tensors[index] = value  # type: ignore[index, assignment]
        if any(not isinstance(x, Tensor) for x in tensors):
            raise TypeError(f"a batch takes tensors, got {value!r}")
        if len(tensors) != len(self._tensors) and (self.atomic or not self._tuple):
            kind = "an atomic batch" if self.atomic else "a tree"
            raise ValueError(f"{kind} of {len(self._tensors)} tensors cannot take {len(tensors)}")
        self._tensors = tensors


def check_tree(input: Any, role: str) -> None:
    """Raise TypeError for a tree without tensors, or with a leaf that is neither a tensor nor a constant."""
    leaves = pytree.tree_leaves(input)
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *CONSTANTS)):
            raise TypeError(f"{role} holds a {type(leaf).__name__}; tensors, numbers and None can be split")
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        raise TypeError(f"{role} is a {type(input).__name__} that holds no tensor")


def check_sizes(input: Any) -> None:
    """Raise ValueError for tensors of unequal batch size; a tensor without dimensions has none."""
    sizes = [x.size(0) for x in pytree.tree_leaves(input) if isinstance(x, Tensor) and x.dim() > 0]
    if len(set(sizes)) > 1:
        raise ValueError(f"the tensors of one mini-batch must share their batch size, got {sizes}")


def scatter(input: Any, chunks: int, sizes: Sequence[int] | None = None) -> list[Batch]:
    """Cut a mini-batch into at most `chunks` micro-batches along the first dimension of every tensor.

    The last micro-batch may be smaller, and there may be fewer than `chunks`. `sizes` gives the samples of
    each micro-batch instead. Every micro-batch gets constants and tensors without dimensions as they are.

    >>> [len(batch.tensor) for batch in scatter(torch.zeros(5), chunks=3)]
    [2, 2, 1]
    >>> [len(batch.tensor) for batch in scatter(torch.zeros(5), chunks=3, sizes=[3, 2])]
    [3, 2]
    """
    whole = Batch(input)
    if len(whole) == 0:
        raise TypeError(f"expected tensors to scatter, got {type(input).__name__}")
    if (chunks == 1 and sizes is None) or all(x.dim() == 0 or x.size(0) == 0 for x in whole):
        if chunks != 1 and all(x.dim() == 0 for x in whole):
            raise ValueError(f"tensors without a batch dimension cannot be cut into {chunks} chunks")
        return [whole]
    cut = [
        None if x.dim() == 0 else x.chunk(chunks) if sizes is None else torch.split(x, list(sizes))
        for x in whole
    ]
    parts_by_size = {
        x.size(0): len(pieces) for x, pieces in zip(whole, cut, strict=True) if pieces is not None
    }
    counts = set(parts_by_size.values())
    uneven = len(parts_by_size) > 1 and any(size % count for size, count in parts_by_size.items())
    if len(counts) > 1 or uneven:
        raise ValueError(f"batch sizes {sorted(parts_by_size)} cannot be cut into {chunks} chunks alike")
    batches = []
    for i in range(counts.pop()):
        batch = whole.copy()
        batch[:] = tuple(x if p is None else p[i] for x, p in zip(whole, cut, strict=True))
        batches.append(batch)
    return batches


def gather(outputs: list[Batch]) -> Any:
    """Join micro-batches: tensors are concatenated, constants must be equal.

    >>> gather([Batch(torch.zeros(2)), Batch(torch.ones(1))]).tolist()
    [0.0, 0.0, 1.0]
    """
    for output in outputs:
        check_tree(output.value, "the output")
    first = outputs[0]
    if len(outputs) == 1:
        return first.value
    if first.atomic and all(batch.atomic for batch in outputs):
        return _concatenate([batch.tensor for batch in outputs])
    trees = [pytree.tree_flatten(batch.value) for batch in outputs]
    spec = trees[0][1]
    if any(other != spec for _, other in trees):
        raise TypeError(f"micro-batches gave different structures: {sorted({str(s) for _, s in trees})}")
    leaves = [_merge(list(column)) for column in zip(*(leaves for leaves, _ in trees), strict=True)]
    return pytree.tree_unflatten(leaves, spec)


def _merge(column: list[Any]) -> Any:
    """One leaf of the output from the same leaf of every micro-batch."""
    if all(isinstance(leaf, Tensor) for leaf in column):
        return _concatenate(column)
    if any(isinstance(leaf, Tensor) or leaf != column[0] for leaf in column):
        raise TypeError(f"micro-batches disagree about a value: {column!r}")
    return column[0]


def _concatenate(tensors: list[Tensor]) -> Tensor:
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError(
            f"an output without dimensions cannot be gathered from {len(tensors)} micro-batches; "
            "compute it (for example, a loss) from the gathered output, or return one element per sample"
        )
    return torch.cat(tensors)
