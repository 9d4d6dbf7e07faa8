"""What capture freezes: Python state, random numbers and clocks outside torch, and hooks."""

from __future__ import annotations

import datetime
import gc
import logging
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn

_CLOCKS = frozenset({"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"})
_DATES = frozenset({"now", "utcnow", "today"})
_NAMES = _CLOCKS | _DATES
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


@contextmanager
def watched(model: nn.Module) -> Iterator[list[str]]:
    """Gives a list; a run of the model inside the block adds a sentence for each thing that capture freezes.

    >>> class Counts(nn.Module):
    ...     def forward(self, x):
    ...         return x * random.random()
    >>> model = Counts()
    >>> with watched(model) as notes:
    ...     _ = model(torch.ones(1))
    >>> notes
    ["frozen by capture: the model draws from Python's random, once, while it is captured"]
    """
    notes: list[str] = []
    if isinstance(model, torch.jit.ScriptModule) or not isinstance(model, nn.Module):
        yield notes
        return
    told = _hook_notes(model)
    before: dict[str, Any] = {}

    def start(*_: Any) -> None:
        before.update(attributes=attributes_of(model), drawn=_generators())
        if sys.getprofile() is None:  # another profiler stays undisturbed, and clocks unnoticed
            clocks: dict[str, str] = {}
            before["clocks"] = clocks
            sys.setprofile(_clock_watcher(clocks))

    def end(*_: Any) -> None:
        if "clocks" in before:
            sys.setprofile(None)
        if not before or notes:
            return
        notes.extend(told)
        notes.extend(_changes(before["attributes"], attributes_of(model)))
        after = _generators()
        notes.extend(
            f"frozen by capture: the model draws from {name}, once, while it is captured"
            for name in after
            if after[name] != before["drawn"].get(name, after[name])
        )
        notes.extend(
            f"frozen by capture: the model reads the clock ({what}) at {where}"
            for where, what in before.get("clocks", {}).items()
        )

    handles = (
        model.register_forward_pre_hook(start, prepend=True),
        model.register_forward_hook(end, always_call=True),
    )
    try:
        yield notes
    finally:
        if "clocks" in before:
            sys.setprofile(None)
        for handle in handles:
            handle.remove()


def changing_modules(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> set[str]:
    """The paths of modules whose attributes differ between two snapshots."""
    return {path for path, held in after.items() if _differing(before.get(path, {}), held)}


def _hook_notes(model: nn.Module) -> list[str]:
    hooked = [
        path or "the model itself"
        for path, module in model.named_modules()
        if any(module.__dict__.get(table) for table in _HOOKS)
    ]
    if not hooked:
        return []
    return [
        f"frozen by capture: hooks of {', '.join(hooked)}; what they compute is part of the graph, what else"
        " they do happens once, while the model is captured"
    ]


def attributes_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Every module's own attributes by path, each as something that shows when it changes."""
    return {
        path: {name: _fingerprint(value) for name, value in vars(module).items() if name not in _OF_TORCH}
        for path, module in model.named_modules()
    }


_OF_TORCH = frozenset(vars(nn.Module()))


def _fingerprint(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value if value == value else "nan"
    if isinstance(value, torch.Tensor):
        return (id(value), value._version)
    if isinstance(value, list | tuple | set | frozenset):
        return (type(value), len(value), [_fingerprint(v) if isinstance(v, _PLAIN) else id(v) for v in value])
    if isinstance(value, dict):
        return (type(value), [(str(key), id(item)) for key, item in value.items()])
    return id(value)


def _differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in {**before, **after} if before.get(name, _ABSENT) != after.get(name, _ABSENT)]


_ABSENT = object()


def _changes(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> list[str]:
    found = [
        f"{path}.{name}" if path else name
        for path, held in after.items()
        for name in _differing(before.get(path, {}), held)
    ]
    if not found:
        return []
    return [
        f"frozen by capture: {', '.join(found)}, which a run of the model changes; compiled, it stays as it"
        " was when the model was captured"
    ]


def _generators() -> dict[str, Any]:
    numpy = sys.modules.get("numpy")
    state = {"Python's random": random.getstate()}
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy's random"] = (kind, keys.tobytes(), *rest)
    return state


def _collects_garbage(frame: FrameType) -> bool:
    """Whether a frame is a callback of the garbage collector, which may run at any time."""
    return any(getattr(callback, "__code__", None) is frame.f_code for callback in gc.callbacks)


def _clock_watcher(clocks: dict[str, str]) -> Callable[[FrameType, str, Any], None]:
    """A profiler that puts into `clocks` where a clock is read, and by which function."""

    def watch(frame: FrameType, event: str, function: Any) -> None:
        # Called at every call and return while a model is traced: what no clock is named is done with here.
        if event == "c_call" and getattr(function, "__name__", "") in _NAMES:
            _note_clock(clocks, frame, function)

    return watch


def _note_clock(clocks: dict[str, str], frame: FrameType, function: Any) -> None:
    name = function.__name__
    of_time = getattr(function, "__module__", None) == "time" and name in _CLOCKS
    owner = getattr(function, "__self__", None)
    of_day = name in _DATES and isinstance(owner, type) and issubclass(owner, datetime.date)
    file = frame.f_code.co_filename
    is_own = "/torch/" not in file and file != logging.__file__  # the time of a message is no result
    if (of_time or of_day) and is_own and not _collects_garbage(frame):
        clocks[f"{file}:{frame.f_lineno}"] = name
