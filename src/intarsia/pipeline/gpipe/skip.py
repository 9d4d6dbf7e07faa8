"""Skip connections between layers of a pipeline: modules stash tensors, and later modules pop them."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from intarsia.pipeline.gpipe.microbatch import Batch
from intarsia.pipeline.gpipe.stream import AbstractStream


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

    # Namespaces are sorted together with None; any order is fine.
    def __lt__(self, other: Namespace | None) -> bool:
        return other is not None and self.id < other.id


class SkipTracker:
    """Stores the skips of one thread outside a pipeline."""

    def __init__(self) -> None:
        self.tensors: dict[tuple[Namespace | None, str], Any] = {}

    def save(self, batch: Batch, ns: Namespace | None, name: str, tensor: Any) -> None:
        """Stash a skip of a micro-batch."""
        self.tensors[(ns, name)] = tensor

    def load(self, batch: Batch, ns: Namespace | None, name: str) -> Any:
        """Pop a skip. Raises KeyError if it was not stashed."""
        return self.tensors.pop((ns, name))

    def copy(
        self, batch: Batch, source: AbstractStream, target: AbstractStream, ns: Namespace | None, name: str
    ) -> None:
        """Copy a skip to another device."""
        raise TypeError("skips can be copied only between the stages of a pipeline")


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

    def namespaced(self, name: str) -> tuple[Namespace | None, str]:
        """The name within its namespace."""
        return self.namespaces.get(name), name

    def stashable(self) -> Iterator[tuple[Namespace | None, str]]:
        """The names that the module stashes."""
        return (self.namespaced(name) for name in sorted(self.stashable_names))

    def poppable(self) -> Iterator[tuple[Namespace | None, str]]:
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
        tracker = current_skip_tracker()
        batch = Batch(input)
        popped: dict[str, Any] = {}
        for ns, name in self.poppable():
            try:
                popped[name] = tracker.load(batch, ns, name)
            except KeyError:
                raise RuntimeError(f"{name!r} cannot be popped: no layer has stashed it") from None
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

        output = self.dispatch(batch.value, handle_stash, handle_pop)
        missing = sorted(self.stashable_names - stashed.keys())
        if missing:
            raise RuntimeError(f"{missing} were declared by @skippable(stash=...) but not stashed")
        if popped:
            raise RuntimeError(f"{sorted(popped)} were declared by @skippable(pop=...) but not popped")
        batch = Batch(output)
        for ns, name in self.stashable():
            tracker.save(batch, ns, name, stashed[name])
        return batch.value

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
    stashed: dict[tuple[Namespace | None, str], str] = {}
    popped: dict[tuple[Namespace | None, str], str] = {}
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


Key = tuple[Namespace | None, str]


class SkipLayout:
    """The source and the destination stage of every skip.

    >>> layout = SkipLayout(2, {(None, "x"): (0, 1)})
    >>> list(layout.copy_policy(1)), layout.requires_copy(None, "x")
    ([(0, None, 'x')], True)
    """

    def __init__(self, num_partitions: int, skip_routes: Mapping[Key, tuple[int, int]]) -> None:
        self.by_ns_name: dict[Key, tuple[int, int]] = dict(skip_routes)
        self.by_partition: list[list[tuple[int, Namespace | None, str]]] = [[] for _ in range(num_partitions)]
        for (ns, name), (source, destination) in skip_routes.items():
            self.by_partition[destination].append((source, ns, name))
        for arrivals in self.by_partition:
            arrivals.sort(key=lambda arrival: arrival[0])

    def copy_policy(self, next_j: int) -> Iterator[tuple[int, Namespace | None, str]]:
        """The skips that stage `next_j` takes from other stages, sorted by source stage."""
        return (arrival for arrival in self.by_partition[next_j] if arrival[0] != next_j)

    def requires_copy(self, ns: Namespace | None, name: str) -> bool:
        """Whether the source and the destination of a skip are different stages."""
        source, destination = self.by_ns_name.get((ns, name), (-1, -1))
        return source != destination


def inspect_skip_layout(partitions: Iterable[nn.Sequential]) -> SkipLayout:
    """The layout of a partitioned module."""
    sources: dict[Key, int] = {}
    routes: dict[Key, tuple[int, int]] = {}
    count = 0
    for j, partition in enumerate(partitions):
        count = j + 1
        for layer in partition.modules():
            if not isinstance(layer, Skippable):
                continue
            for key in layer.stashable():
                sources[key] = j
            for key in layer.poppable():
                routes[key] = (sources[key], j)
    return SkipLayout(count, routes)
