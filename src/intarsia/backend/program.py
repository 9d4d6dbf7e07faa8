"""A graph compiled for one set of weights, and whether a call brings the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from intarsia.backend.frozen import Autocast, Frozen, without_autocast
from intarsia.runtime.compiled import Compiled

Stamp = tuple[int, int, int]  # of a tensor: which it is, where its memory is, how often it was written to


@dataclass(frozen=True, eq=False)
class Program:
    """A compiled graph. Its weights are known by identity and place; how often they were written to is
    watched by the compiled module itself, which raises StaleWeightsError.
    """

    compiled: Callable[..., Any]
    frozen: Frozen
    autocast: Autocast
    weights_of: Callable[[Sequence[Any]], tuple[Any, ...]]
    ids: tuple[int, ...]
    addresses: tuple[int, ...]
    refs: tuple[weakref.ref[torch.Tensor], ...]  # whose callbacks drop the program with its weights

    def fits(self, args: Sequence[Any]) -> bool:
        """Whether these are the weights and settings it was compiled with."""
        weights = self.weights_of(args)
        return (
            tuple(map(id, weights)) == self.ids
            and tuple(map(torch.Tensor.data_ptr, weights)) == self.addresses
            and all(args[i].item() == number for i, number in self.frozen.settings)
        )

    def __call__(self, args: Sequence[Any]) -> Any:
        taken = [args[i] for i in self.frozen.taken]
        if self.autocast:
            with without_autocast(self.autocast):
                made = self.compiled(*taken)
        else:
            made = self.compiled(*taken)
        return (made,) if self.frozen.single else made


def program_of(
    compiled: Compiled,
    frozen: Frozen,
    autocast: Autocast,
    args: Sequence[Any],
    drop: Callable[[], Callable[[Program], None] | None],
) -> Program:
    """A program. When one of its weights is gone, what `drop` gives is called with it."""
    weights_of = picker(frozen.weights)
    weights = weights_of(args)
    made: list[weakref.ref[Program]] = []

    def gone(_: object) -> None:
        forget, program = drop(), made[0]() if made else None
        if forget is not None and program is not None:
            forget(program)

    program = Program(
        compiled,
        frozen,
        autocast,
        weights_of,
        tuple(map(id, weights)),
        tuple(map(torch.Tensor.data_ptr, weights)),
        tuple(weakref.ref(weight, gone) for weight in weights),
    )
    made.append(weakref.ref(program))
    return program


def picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that picks these places of a call, at the speed of C.

    >>> picker([2])("abc"), picker([])("abc"), picker([0, 2])("abc")
    (('c',), (), ('a', 'c'))
    """
    if len(places) > 1:
        return itemgetter(*places)
    return lambda args: tuple(args[i] for i in places)


def stamp(tensor: torch.Tensor) -> Stamp:
    """What tells a tensor from another, and from itself after it was written to."""
    version = 0 if tensor.is_inference() else tensor._version
    return id(tensor), tensor.data_ptr(), version
