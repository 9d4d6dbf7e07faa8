"""Effects of a model's run that its graph does not repeat, each with its consequence.

refusal   the graph would answer differently: the model is not captured, only the parts that do nothing so
warning   state in Python that every run changes: later answers of the model may depend on it
note      what else happens once, while the model is captured
"""

from __future__ import annotations

import datetime
import dis
import gc
import inspect
import logging
import random
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

from intarsia.capture.example import Call, copied_call
from intarsia.capture.output_objects import open_objects
from intarsia.capture.protect import undisturbed
from intarsia.compare import disagreement
from intarsia.errors import UnrepeatableError

_CLOCKS = frozenset({"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"})
_DATES = frozenset({"now", "utcnow", "today"})
_SEEDS = frozenset({"manual_seed", "seed", "set_state"})
_NAMES = _CLOCKS | _DATES | _SEEDS
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_OF_TORCH = frozenset(vars(nn.Module()))
_ABSENT = object()
_STORES_GLOBAL, _STORES_CELL = dis.opmap["STORE_GLOBAL"], dis.opmap["STORE_DEREF"]
_ASIDE = ("_dynamo/convert_frame.py", "torch/_inductor/", "torch/_higher_order_ops/", "importlib._bootstrap")
FROZEN = "frozen by capture: "


@dataclass(frozen=True)
class Effect:
    """One thing that a run did. State that changed has a name, and what it was when the run began."""

    text: str
    follows: Literal["refusal", "warning", "note"]
    name: str = ""
    before: Any = field(default=None, compare=False)


@contextmanager
def watched(model: nn.Module) -> Iterator[list[Effect]]:
    """Gives a list; a run of the model inside the block adds what it does that a graph does not repeat.

    >>> class Draws(nn.Module):
    ...     def forward(self, x):
    ...         return x * random.random()
    >>> model = Draws()
    >>> with watched(model) as effects:
    ...     _ = model(torch.ones(1))
    >>> [(effect.follows, effect.text) for effect in effects]
    [('refusal', "the model draws from Python's random, which a graph does not repeat")]
    """
    # With hooks of its own: those of `watch_calls` read the clock, which would be taken for the model's.
    effects: list[Effect] = []
    if isinstance(model, torch.jit.ScriptModule) or not isinstance(model, nn.Module):
        yield effects
        return
    hooks, runs = _hook_effects(model), list[_Run]()

    def start(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        runs.append(_Run(model, (args, kwargs)))

    def end(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], __: Any) -> None:
        runs[0].end()
        if len(runs) == 1:  # a later run repeats the first
            effects.extend([*hooks, *runs[0].effects(model, (args, kwargs))])

    handles = (
        model.register_forward_pre_hook(start, prepend=True, with_kwargs=True),
        model.register_forward_hook(end, always_call=True, with_kwargs=True),
    )
    try:
        yield effects
    finally:
        for run in runs:
            run.end()
        for handle in handles:
            handle.remove()


def settled(effects: Sequence[Effect], model: nn.Module, call: Call) -> list[Effect]:
    """The effects, with state that only the first run changes (a cache that it fills) as a note.

    Where state changed, the model is run again, and once more if that changes state, too. UnrepeatableError
    for effects that no graph may omit.
    """
    refused = next((effect for effect in effects if effect.follows == "refusal"), None)
    if refused is not None:
        raise UnrepeatableError(refused.text)
    if all(effect.follows == "note" for effect in effects):
        return list(effects)
    with undisturbed(model):
        first, answer = _run_again(model, call)
        second, other = _run_again(model, call) if any(first) else (first, answer)
    lasting = {name for name, e in second.items() if name in first and first[name].before != e.before}
    settled = [e if not e.name or e.name in lasting else replace(e, follows="note") for e in effects]
    if lasting and disagreement(other, answer) is not None:
        texts = "; ".join(effect.text for effect in settled if effect.follows == "warning")
        raise UnrepeatableError(f"the next answer of the model depends on state in Python: {texts}")
    return settled


def _run_again(model: nn.Module, call: Call) -> tuple[dict[str, Effect], list[Any]]:
    """The effects of a run, by name, and a copy of its answer."""
    args, kwargs = copied_call(call)
    with torch.random.fork_rng(devices=[]), watched(model) as seen:
        leaves = pytree.tree_leaves(open_objects(model(*args, **kwargs)))
    answer = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return {effect.name: effect for effect in seen}, answer


class _Run:
    """A run of a model that goes on: what was there when it began, and what it calls."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        self._held = pytree.tree_leaves(call)  # so that no identity is used again
        self._arguments = shape_of_call(*call)
        self._attributes, self._generators = attributes_of(model), _generators()
        self._calls = _Calls()
        self._is_watching = sys.getprofile() is None  # another profiler stays undisturbed
        if self._is_watching:
            sys.setprofile(self._calls.see)

    def end(self) -> None:
        if self._is_watching:
            sys.setprofile(None)
            self._is_watching = False

    def effects(self, model: nn.Module, call: Call) -> Iterator[Effect]:
        calls, generators = self._calls, _generators()
        if shape_of_call(*call) != self._arguments:
            what = "changes a list or dictionary that it is given, which no graph records"
            yield Effect(f"{type(model).__name__} {what}", "refusal")
        for where, function in calls.seeds.items():
            yield Effect(f"the model calls {function} at {where}, which a graph does not repeat", "refusal")
        for name, state in generators.items():
            if state != self._generators.get(name, state):
                yield Effect(f"the model draws from {name}, which a graph does not repeat", "refusal")
        yield from self._changes(attributes_of(model))
        for name, (where, before) in calls.changed.items():
            text = f"{FROZEN}{name}, which a run of the model changes at {where}"
            yield Effect(text, "warning", name, before)
        for where, function in calls.clocks.items():
            yield Effect(f"{FROZEN}the model reads the clock ({function}) at {where}", "note")

    def _changes(self, after: dict[str, dict[str, Any]]) -> Iterator[Effect]:
        for path, held in after.items():
            before = self._attributes.get(path, {})
            for attribute in _differing(before, held):
                name = f"{path}.{attribute}" if path else attribute
                where = self._calls.line_of(attribute)
                text = f"{FROZEN}{name}, which a run of the model changes{where}"
                yield Effect(text, "warning", name, before.get(attribute, _ABSENT))


class _Calls:
    """A profiler that notes clocks that are read, generators that are seeded, and variables that are set."""

    def __init__(self) -> None:
        self.clocks: dict[str, str] = {}
        self.seeds: dict[str, str] = {}
        self.changed: dict[str, tuple[str, Any]] = {}  # variables: where they are set, what they were
        self._stores: dict[CodeType, tuple[str, ...]] = {}
        self._before: dict[tuple[CodeType, str], Any] = {}

    def see(self, frame: FrameType, event: str, function: Any) -> None:
        # Called at every call and return while a model runs: most of them are done with here.
        if event == "c_call":
            if getattr(function, "__name__", "") in _NAMES:
                self._see_named(frame, function)
            return
        code = frame.f_code
        names = self._stores.get(code)
        if names is None:
            names = self._stores[code] = _stored(code)
        if names and event in ("call", "return"):
            self._see_variables(frame, code, names)

    def _see_variables(self, frame: FrameType, code: CodeType, names: tuple[str, ...]) -> None:
        if _is_aside(frame):
            return
        for name in names:
            scope = frame.f_locals if name in code.co_freevars else frame.f_globals
            value = _fingerprint(scope.get(name, _ABSENT))
            before = self._before.setdefault((code, name), value)
            if before != value:
                self.changed.setdefault(name, (f"{code.co_filename}:{_line(code, name, 'STORE')}", before))

    def _see_named(self, frame: FrameType, function: Any) -> None:
        name, owner = function.__name__, getattr(function, "__self__", None)
        if name in _SEEDS:
            if isinstance(owner, torch.Generator) and not _is_aside(frame):
                self.seeds[_caller(frame)] = f"Generator.{name}"
            return
        of_time = getattr(function, "__module__", None) == "time" and name in _CLOCKS
        of_day = name in _DATES and isinstance(owner, type) and issubclass(owner, datetime.date)
        file = frame.f_code.co_filename
        is_own = not _is_torch(file) and file != logging.__file__  # the time of a message is no result
        if (of_time or of_day) and is_own and not _is_aside(frame):
            self.clocks[f"{file}:{frame.f_lineno}"] = name

    def line_of(self, attribute: str) -> str:
        """` at file:line` where code that ran sets an attribute, or else reads it; nothing if none does."""
        for instruction in ("STORE_ATTR", "LOAD"):
            for code in self._stores:
                is_users = attribute in code.co_names and not _is_torch(code.co_filename)
                if is_users and (line := _line(code, attribute, instruction)) is not None:
                    return f" at {code.co_filename}:{line}"
        return ""


def _stored(code: CodeType) -> tuple[str, ...]:
    """The variables outside of it that a function of the user's sets."""
    operations = code.co_code[::2]
    if _is_torch(code.co_filename) or not (_STORES_GLOBAL in operations or _STORES_CELL in operations):
        return ()
    stores = [i for i in dis.get_instructions(code) if i.opcode in (_STORES_GLOBAL, _STORES_CELL)]
    outside = [i for i in stores if i.opcode == _STORES_GLOBAL or i.argval in code.co_freevars]
    return tuple(dict.fromkeys(i.argval for i in outside))


def _line(code: CodeType, name: str, instruction: str) -> int | None:
    line = code.co_firstlineno
    for one in dis.get_instructions(code):
        line = one.starts_line if type(one.starts_line) is int else getattr(one, "line_number", None) or line
        if one.argval == name and one.opname.startswith(instruction):
            return line
    return None


def _caller(frame: FrameType | None) -> str:
    """The innermost line outside torch."""
    while frame is not None and _is_torch(frame.f_code.co_filename):
        frame = frame.f_back
    return "an unknown place" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_torch(file: str) -> bool:
    return "/torch/" in file


def _is_aside(frame: FrameType | None) -> bool:
    """Whether a garbage collection, an import, or Dynamo (for bodies of `torch.cond`) runs a frame."""
    callbacks = [getattr(callback, "__code__", None) for callback in gc.callbacks]
    while frame is not None and not frame.f_code.co_filename.endswith("torch/nn/modules/module.py"):
        if frame.f_code in callbacks or any(part in frame.f_code.co_filename for part in _ASIDE):
            return True
        frame = frame.f_back
    return False


def shape_of_call(args: Sequence[Any], kwargs: Any) -> tuple[pytree.TreeSpec, list[int]]:
    """How the arguments are nested, and which objects they are."""
    flat, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    return structure, [id(value) for value in flat]


def changing_modules(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> set[str]:
    """The paths of modules whose attributes differ between two snapshots."""
    return {path for path, held in after.items() if _differing(before.get(path, {}), held)}


def _hook_effects(model: nn.Module) -> list[Effect]:
    hooked = [
        path or "the model itself"
        for path, module in model.named_modules()
        if any(module.__dict__.get(table) for table in _HOOKS)
    ]
    if not hooked:
        return []
    what = "the graph contains what they compute; their other effects happen once, during the capture"
    return [Effect(f"{FROZEN}hooks of {', '.join(hooked)}; {what}", "note")]


def attributes_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Every module's own attributes, and those of its class, by path, as something that shows a change."""
    known: dict[int, Any] = {}  # an object, such as a configuration, that many modules hold is read once
    return {
        path: {
            **{name: _fingerprint(value) for name, value in _class_values(type(module)).items()},
            **{name: _deep(value, known) for name, value in vars(module).items() if name not in _OF_TORCH},
        }
        for path, module in model.named_modules()
    }


def _class_values(kind: type) -> dict[str, Any]:
    kinds = [k for k in reversed(kind.__mro__) if not k.__module__.startswith(("torch.", "builtins"))]
    values = {name: value for k in kinds for name, value in vars(k).items() if not name.startswith("__")}
    return {name: value for name, value in values.items() if isinstance(value, (*_PLAIN, list, dict, set))}


def _deep(value: Any, known: dict[int, Any]) -> Any:
    """The fingerprint of a value, and of the attributes of a plain object."""
    if isinstance(value, (*_PLAIN, torch.Tensor, nn.Module, type)) or inspect.isroutine(value):
        return _fingerprint(value)
    held = getattr(value, "__dict__", None)
    if held is None:
        # Of an iterator in C, such as itertools.count, only the text shows where it is.
        return (id(value), repr(value)) if type(value).__module__ == "itertools" else _fingerprint(value)
    if id(value) not in known:
        known[id(value)] = (_fingerprint(value), {name: _fingerprint(item) for name, item in held.items()})
    return known[id(value)]


def _fingerprint(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value if value == value else "nan"
    if isinstance(value, torch.Tensor):
        return (id(value), None if value.is_inference() else value._version)
    if isinstance(value, list | tuple | set | frozenset | deque):
        return (type(value), len(value), [_fingerprint(v) if isinstance(v, _PLAIN) else id(v) for v in value])
    if isinstance(value, dict):
        return (
            type(value),
            [(str(key), _fingerprint(v) if isinstance(v, _PLAIN) else id(v)) for key, v in value.items()],
        )
    return id(value)


def _differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in {**before, **after} if before.get(name, _ABSENT) != after.get(name, _ABSENT)]


def _generators() -> dict[str, Any]:
    numpy = sys.modules.get("numpy")
    state = {"Python's random": random.getstate()}
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy's random"] = (kind, keys.tobytes(), *rest)
    return state
