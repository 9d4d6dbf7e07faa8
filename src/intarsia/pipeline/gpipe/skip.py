"""Skip connections between layers of a pipeline: modules stash tensors, and later modules pop them."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn


class Namespace:
    """A unique name; copies of it are equal.

    >>> import copy
    >>> ns = Namespace()
    >>> copy.deepcopy(ns) == ns, Namespace() == ns
    (True, False)
    """

    __slots__ = ("id",)

    def __init__(self) -> None:
        self.id: uuid.UUID = uuid.uuid4()

    def __repr__(self) -> str:
        return f"<Namespace {self.id}>"

    def __hash__(self) -> int:
        return hash(self.id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self.id == other.id


Key = tuple[Namespace | None, str]


@dataclass
class SkipTracker:
    """The skips that wait for the layers that pop them."""

    tensors: dict[Key, Any] = field(default_factory=dict)


class _Current(threading.local):
    def __init__(self) -> None:
        self.tracker: SkipTracker | None = None


_current = _Current()


@contextmanager
def use_skip_tracker(skip_tracker: SkipTracker) -> Iterator[None]:
    """Make skippable modules on this thread use a tracker."""
    before, _current.tracker = _current.tracker, skip_tracker
    try:
        yield
    finally:
        _current.tracker = before


def current_skip_tracker() -> SkipTracker:
    """The tracker of this thread."""
    if _current.tracker is None:
        _current.tracker = SkipTracker()
    return _current.tracker


@dataclass(frozen=True, slots=True)
class stash:
    """A skippable module's `forward` yields it to stash a tensor (or None) under a name."""

    name: str
    tensor: Tensor | None


@dataclass(frozen=True, slots=True)
class pop:
    """A skippable module's `forward` yields it to get the tensor that was stashed under a name."""

    name: str


class Skippable(nn.Module):
    """The base class of skippable modules: it runs the module's `forward` and serves its yields."""

    module_cls: ClassVar[type[nn.Module]]
    stashable_names: ClassVar[frozenset[str]] = frozenset()
    poppable_names: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module: nn.Module = self.module_cls(*args, **kwargs)
        self.namespaces: dict[str, Namespace | None] = {}

    def __repr__(self) -> str:
        return f"@skippable({self.module})"

    def namespaced(self, name: str) -> Key:
        """The name within its namespace."""
        return self.namespaces.get(name), name

    def stashable(self) -> Iterator[Key]:
        """The names that the module stashes."""
        return (self.namespaced(name) for name in sorted(self.stashable_names))

    def poppable(self) -> Iterator[Key]:
        """The names that the module pops."""
        return (self.namespaced(name) for name in sorted(self.poppable_names))

    def isolate(self, ns: Namespace, *, only: Iterable[str] | None = None) -> Skippable:
        """Put the module's names (or those in `only`) into a namespace, and return the module.

        A pop gets a tensor only from a stash in the same namespace, so a block with a skip can be used twice.
        """
        names = self.stashable_names | self.poppable_names
        chosen = names if only is None else set(only)
        unknown = sorted(chosen - names)
        if unknown:
            raise ValueError(f"{unknown} are not skips of {self.module_cls.__name__}")
        for name in sorted(chosen):
            self.namespaces[name] = ns
        return self

    def forward(self, input: Any) -> Any:
        skips = current_skip_tracker().tensors
        popped: dict[str, Any] = {}
        for key in self.poppable():
            if key not in skips:
                raise RuntimeError(f"{key[1]!r} cannot be popped: no layer has stashed it")
            popped[key[1]] = skips.pop(key)
        stashed: dict[str, Any] = {}

        def handle_stash(name: str, tensor: Any) -> None:
            if name not in self.stashable_names:
                raise RuntimeError(f"{name!r} was stashed without being declared by @skippable(stash=...)")
            stashed[name] = tensor

        def handle_pop(name: str) -> Any:
            if name not in self.poppable_names:
                raise RuntimeError(f"{name!r} was popped without being declared by @skippable(pop=...)")
            if name not in popped:
                raise RuntimeError(f"{name!r} was popped twice")
            return popped.pop(name)

        output = self.dispatch(input, handle_stash, handle_pop)
        missing = sorted(self.stashable_names - stashed.keys())
        if missing:
            raise RuntimeError(f"{missing} were declared by @skippable(stash=...) but not stashed")
        if popped:
            raise RuntimeError(f"{sorted(popped)} were declared by @skippable(pop=...) but not popped")
        skips.update({key: stashed[key[1]] for key in self.stashable()})
        return output

    def dispatch(
        self, input: Any, handle_stash: Callable[[str, Any], None], handle_pop: Callable[[str], Any]
    ) -> Any:
        """Run the module and serve its yields; returns the module's output."""
        steps = self.module(input)
        if not isinstance(steps, Generator):
            return steps  # the module does not yield
        popped: Any = None
        while True:
            try:
                step = steps.send(popped)
            except StopIteration as stop:
                return stop.value
            if isinstance(step, stash):
                handle_stash(step.name, step.tensor)
                popped = None
            elif isinstance(step, pop):
                popped = handle_pop(step.name)
            else:
                raise TypeError(f"{step!r} was yielded; a skippable module yields stash(...) or pop(...)")


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = ()
) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Declare the skips that a module stashes and pops. Its `forward` is a generator.

    >>> @skippable(stash=["early"])
    ... class Early(nn.Module):
    ...     def forward(self, x):
    ...         yield stash("early", x)
    ...         return x * 2
    >>> @skippable(pop=["early"])
    ... class Late(nn.Module):
    ...     def forward(self, x):
    ...         early = yield pop("early")
    ...         return x + early
    >>> import torch
    >>> nn.Sequential(Early(), Late())(torch.tensor([1.0]))
    tensor([3.])
    """
    names = {"stashable_names": frozenset(stash), "poppable_names": frozenset(pop)}

    def wrap(module_cls: type[nn.Module]) -> type[Skippable]:
        return type(
            module_cls.__name__,
            (Skippable,),
            {
                "module_cls": module_cls,
                "__doc__": module_cls.__doc__,
                "__module__": module_cls.__module__,
                "__qualname__": module_cls.__qualname__,
                **names,
            },
        )

    return wrap


def verify_skippables(module: nn.Sequential) -> None:
    """Raise TypeError, with all faults, for a module whose stashes and pops do not pair up."""
    stashed: dict[Key, str] = {}
    popped: dict[Key, str] = {}
    faults: list[str] = []
    for where, layer in module.named_modules():
        if not isinstance(layer, Skippable):
            continue
        poppable = list(layer.poppable())
        for key in layer.stashable():
            if key in poppable:
                faults.append(f"{where!r} declares {key[1]!r} both to be stashed and to be popped")
            elif key in stashed:
                faults.append(
                    f"{where!r} stashes {key[1]!r} again, after {stashed[key]!r}; isolate() one of them"
                )
            stashed.setdefault(key, where)
        for key in poppable:
            if key in popped:
                faults.append(
                    f"{where!r} pops {key[1]!r} again, after {popped[key]!r}; isolate() one of them"
                )
            elif key not in stashed:
                faults.append(f"{where!r} pops {key[1]!r}, which no layer before it stashes")
            popped.setdefault(key, where)
    for key, where in stashed.items():
        if key not in popped:
            faults.append(f"{where!r} stashes {key[1]!r}, which no layer after it pops")
    if faults:
        raise TypeError("skip connections do not pair up:" + "".join(f"\n * {fault}" for fault in faults))


@dataclass(frozen=True)
class StageSkips:
    """The skips between a stage and others: inputs and outputs of the stage, beside its micro-batch.

    A skip goes straight from the stage that stashes it to the stage that pops it, past those between.
    """

    takes: dict[Key, int] = field(default_factory=dict)  # each with the stage that stashes it
    gives: dict[Key, int] = field(default_factory=dict)  # each with the stage that pops it


def inspect_skip_layout(partitions: Iterable[nn.Sequential]) -> list[StageSkips]:
    """The skips of each stage of a partitioned module."""
    sources: dict[Key, int] = {}
    layout: list[StageSkips] = []
    for j, partition in enumerate(partitions):
        layout.append(StageSkips())
        for layer in partition.modules():
            if not isinstance(layer, Skippable):
                continue
            sources.update(dict.fromkeys(layer.stashable(), j))
            for key in layer.poppable():
                if sources[key] != j:
                    layout[j].takes[key] = sources[key]
                    layout[sources[key]].gives[key] = j
    return layout
