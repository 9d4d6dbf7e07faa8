"""Ownership of memory: which results must be copied so that the caller owns them.

Where the graph removed a copy, folded a constant or merged equal nodes, a result may share memory that the
model's result does not share. Such a result is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from intarsia.errors import InputError
from intarsia.plain_tensors import plain_tensors

Place = tuple[int, torch.device]  # the address of a storage, and its device


def storages_of(value: Any) -> list[Place]:
    """The storages of a tensor: several for a tensor subclass with parts, none for an empty tensor."""
    if not isinstance(value, torch.Tensor):
        return []
    return [(part.untyped_storage().data_ptr(), part.device) for part in plain_tensors(value) if part.numel()]


def constants_of(module: nn.Module) -> list[torch.Tensor]:
    """The tensors of a graph and its bodies: frozen weights and folded constants."""
    values = [
        value
        for part in module.modules()
        for table in (part._parameters, part._buffers, part.__dict__)
        for value in table.values()
    ]
    return [value for value in values if isinstance(value, torch.Tensor)]


class Ownership:
    """Copies results that share memory with an input, a weight, a buffer or another result.

    Results of engines are fresh; only the others are checked.
    """

    def __init__(
        self, constants: Iterable[Any], buffers: Sequence[torch.Tensor], fresh: Sequence[bool]
    ) -> None:
        self._constants = {place for tensor in constants for place in storages_of(tensor)}
        self._buffers = list(buffers)
        self._fresh = [index for index, is_fresh in enumerate(fresh) if is_fresh]
        self._shared = [index for index, is_fresh in enumerate(fresh) if not is_fresh]

    def own(self, results: Sequence[Any], inputs: Sequence[Any]) -> Sequence[Any]:
        """The results, each with memory of its own."""
        if not self._shared:
            return results
        values = (*inputs, *self._buffers, *(results[index] for index in self._fresh))
        used = {place for value in values for place in storages_of(value)} | self._constants
        owned = list(results)
        for index in self._shared:
            places = storages_of(owned[index])
            if not used.isdisjoint(places):
                owned[index] = owned[index].clone()
            used.update(places)
        return owned

    def check_written(
        self, written: Sequence[tuple[str, torch.Tensor]], others: Sequence[tuple[str, Any]]
    ) -> None:
        """InputError if a tensor that the model writes to shares memory with another input or a weight."""
        everything = [*others, *(("a buffer of the model", buffer) for buffer in self._buffers)]
        for name, target in written:
            if not self._constants.isdisjoint(storages_of(target)):
                raise InputError(
                    f"input {name} is written to by the model and shares memory with one of its weights;"
                    " pass a copy"
                )
            for other, value in everything:
                if value is not target or other != name:
                    _check_apart(name, target, other, value)


def _check_apart(name: str, target: torch.Tensor, other: str, value: Any) -> None:
    places = storages_of(target)
    if not places or storages_of(value) != places:
        return
    (low, high), (start, end) = _extent(target), _extent(value)
    if low < end and start < high:
        raise InputError(
            f"input {name} is written to by the model and shares memory with {other}: the compiled module"
            " would not see the change; pass a copy"
        )


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The range of a tensor's bytes in its storage."""
    size = tensor.element_size()
    reach = sum((int(n) - 1) * int(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * size
    return start, start + (reach + 1) * size
