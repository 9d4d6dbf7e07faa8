"""Noticing that a model counts its calls in Python, which tracing would freeze.

What only a first call sets is allowed: models of transformers do so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from intarsia.errors import CaptureError
from intarsia.pipeline.stages.trial import trial

_Made = TypeVar("_Made")
_Numbers = dict[tuple[nn.Module, str], Any]
_OF_TORCH = frozenset(vars(nn.Module()))


def trace_without_counters(
    trace: Callable[[], _Made], model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> _Made:
    """What `trace` gives; refused if it changed a number that another call of the model changes again.

    What is set once, when a model is first called, is as good as a constant.
    """
    with _put_back(model) as before, _at_its_end(model) as ends:
        made = trace()
        ends.append(_numbers(model))
    changed = {key for after in ends for key in after if after[key] != before.get(key)}
    if changed:
        with _put_back(model), trial(model), torch.no_grad():
            model(*args, **kwargs)
            once = _numbers(model)
            model(*args, **kwargs)
            twice = _numbers(model)
        for module, name in changed:
            if once.get((module, name)) != twice.get((module, name)):
                raise CaptureError(
                    f"{type(module).__name__} changes its {name} at every call, which tracing would freeze"
                )
    return made


def _numbers(model: nn.Module) -> _Numbers:
    """The numbers and words that modules keep as attributes."""
    return {
        (module, name): value
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str) and name not in _OF_TORCH
    }


@contextmanager
def _put_back(model: nn.Module) -> Iterator[_Numbers]:
    """Gives the numbers as they are, which they are again afterwards."""
    before = _numbers(model)
    try:
        yield before
    finally:
        for (module, name), value in before.items():
            vars(module)[name] = value


@contextmanager
def _at_its_end(model: nn.Module) -> Iterator[list[_Numbers]]:
    """Gives a list; a call adds the numbers at its end, since export puts them back before it returns."""
    ends: list[_Numbers] = []
    hook = model.register_forward_hook(lambda *_: ends.append(_numbers(model)))
    try:
        yield ends
    finally:
        hook.remove()
