"""Noticing that the way through a model is decided by random numbers, which tracing would freeze."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from intarsia.errors import CaptureError

_DRAWS = {torch.rand, torch.rand_like, torch.Tensor.uniform_}
_ENDS = (0.0, 1.0 - 2.0**-24)  # the least and the largest number that torch.rand gives


def trace_without_chance(trace: Callable[[], fx.Graph]) -> fx.Graph:
    """What `trace` gives; refused if another throw of the dice would give another graph.

    LayerDrop compares a random number with a probability to skip a layer. Both ends are tried: where the
    probability is zero, both give the same graph.
    """
    found: list[fx.Graph] = []
    for end in _ENDS:
        with _Dice(end) as dice, torch.random.fork_rng(), _no_other_dice():
            found.append(trace())
        if not dice.thrown:
            break
    if len({str(graph) for graph in found}) > 1:
        raise CaptureError("which modules run is decided by random numbers, which tracing would freeze")
    return found[0]


class _Dice(TorchFunctionMode):
    """Every uniform random number is `value`."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value, self.thrown = value, False

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        drawn = func(*args, **(kwargs or {}))
        if func in _DRAWS and isinstance(drawn, torch.Tensor):
            self.thrown = True
            drawn.fill_(self.value)
        return drawn


@contextmanager
def _no_other_dice() -> Iterator[None]:
    """Refuse what draws random numbers of Python or NumPy, and put their state back."""
    numpy = sys.modules.get("numpy")
    before = random.getstate()
    array = None if numpy is None else numpy.random.get_state()
    try:
        yield
        drew = random.getstate() != before
        if numpy is not None and array is not None:
            drew |= any(str(a) != str(b) for a, b in zip(array, numpy.random.get_state(), strict=True))
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.random.set_state(array)
    if drew:
        raise CaptureError("it draws random numbers in Python, which tracing would freeze")
