"""A graph compiled for one set of weights, and whether a call brings the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from intarsia.backend.frozen import Autocast, Frozen, without_autocast
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.freshness import Freshness, Weight


@dataclass(frozen=True, eq=False)
class Program:
    """A compiled graph, and the weights it holds. That they are the same tensors is looked at before a call;
    whether they were written to, the compiled module itself looks, which raises StaleWeightsError.
    """

    compiled: Callable[..., Any]
    frozen: Frozen
    autocast: Autocast
    weights_of: Callable[[Sequence[Any]], tuple[Any, ...]]
    weights: Freshness  # which drops the program with its weights

    def fits(self, args: Sequence[Any]) -> bool:
        """Whether these are the weights and settings it was compiled with."""
        return self.weights.holds(self.weights_of(args)) and all(
            args[i].item() == number for i, number in self.frozen.settings
        )

    def changed(self, args: Sequence[Any]) -> list[int]:
        """Which of the call's inputs are weights that it was not compiled with, or that were written to."""
        return [self.frozen.weights[place] for place in self.weights.changed(self.weights_of(args))]

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
    made: list[weakref.ref[Program]] = []

    def gone(_: object) -> None:
        forget, program = drop(), made[0]() if made else None
        if forget is not None and program is not None:
            forget(program)

    weights = Freshness([Weight("", weight) for weight in weights_of(args)], gone=gone)
    program = Program(compiled, frozen, autocast, weights_of, weights)
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
