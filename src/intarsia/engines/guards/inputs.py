"""Guards of inputs, looked at before the engine runs.

One thread looks, in numpy. `torch.dot` over an image is sooner done by two threads, of which one then spins
for milliseconds on the core that the engine needs: ResNet-50 ran at 0.88 of the speed of its best peer, and
at 0.99 since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from intarsia.engines.guards.cached_squares import REACH, squares_of
from intarsia.engines.guards.kinds import AnyGuard, ValueGuard

Array = np.ndarray[Any, Any]


def input_check(guard: ValueGuard) -> Callable[[Array], bool]:
    """Whether an input holds what it must; asked before the engine runs, at every call."""
    low, high, limit = guard.low, guard.high, REACH * guard.high * guard.high

    def small_squares(array: Array) -> bool:
        return squares_of(array) <= limit

    def total(array: Array) -> bool:
        return float(np.abs(array.astype(np.float64)).sum()) <= high

    def within(array: Array) -> bool:
        array = _wide(array)
        return not array.size or bool(low <= array.min() and array.max() <= high)

    if not guard.total:
        return within
    return small_squares if guard.low < 0 else total  # floats of any sign, or numbers that are added up


def _wide(array: Array) -> Array:
    """Half floats in single precision: numpy is fast there."""
    return array.astype(np.float32) if array.dtype == np.float16 else array


def told_of(broken: Sequence[AnyGuard], names: Sequence[str], tensors: Sequence[Any]) -> str:
    """What does not hold, in a sentence, with the values of inputs."""
    told = []
    for guard in broken[:3]:
        name = guard.tensors[0]
        told.append(f"{guard}{_values(tensors[names.index(name)]) if name in names else ''}")
    return ", and ".join(told)


def _values(given: Any) -> str:
    if not isinstance(given, torch.Tensor) or not given.numel():
        return f"; it is {given}"
    low, high = torch.aminmax(given)
    said = f"{low:g} to {high:g}" if given.is_floating_point() else f"{int(low)} to {int(high)}"
    return f"; it holds {said}"
