"""The modules in an object, which of them call which, and recorded calls, with the sizes that vary."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from intarsia.capture.example import copied_call
from intarsia.capture.watch import Ended, watch_calls
from intarsia.errors import InputError

_DEPTH = 6  # of attributes of attributes
_MOST = 50_000  # objects that are visited


def held_modules(target: Any) -> dict[str, nn.Module]:
    """Every module in an object, once, by a path that describes where it is.

    >>> class Service:
    ...     def __init__(self):
    ...         self.models = {"small": nn.Sequential(nn.Linear(2, 2))}
    >>> list(held_modules(Service()))
    ["models['small']", "models['small'].0"]
    """
    modules: dict[str, nn.Module] = {}
    seen: set[int] = set()
    for path, module in _roots(target, "", _DEPTH, set()):
        for inner, part in module.named_modules():
            if id(part) not in seen:
                seen.add(id(part))
                modules[".".join(filter(None, (path, inner))) or type(part).__name__] = part
    return modules


def _roots(value: Any, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(value) in seen or len(seen) > _MOST:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield path, value
        return
    if not depth or isinstance(value, (str, bytes, int, float, type, ModuleType)) or value is None:
        return
    for name, item in _parts(value, path):
        yield from _roots(item, name, depth - 1, seen)


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"{path}[{key!r}]", item) for key, item in list(value.items()))
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"{path}[{place}]", item) for place, item in enumerate(value))
    elif isinstance(value, MethodType):
        yield path, value.__self__
    elif isinstance(value, FunctionType):
        for name in value.__code__.co_names:  # a service's handler may use a global model
            if name in value.__globals__:
                yield name, value.__globals__[name]
        for cell, name in zip(value.__closure__ or (), value.__code__.co_freevars, strict=False):
            try:
                yield f"{path}.{name}" if path else name, cell.cell_contents
            except ValueError:  # a variable without a value
                continue
    else:
        slots = [name for kind in type(value).__mro__ for name in _slots(kind) if hasattr(value, name)]
        attributes = {name: getattr(value, name) for name in slots} | getattr(value, "__dict__", {})
        for name, item in attributes.items():
            yield f"{path}.{name}" if path else name, item


def _slots(kind: type) -> tuple[str, ...]:
    """The slots of a class, by the names that `getattr` takes."""
    named = kind.__dict__.get("__slots__", ())
    slots = (named,) if isinstance(named, str) else tuple(named)
    return tuple(name for name in slots if not name.startswith("__"))


@dataclass
class CallTree:
    """The seconds spent in each module, including its submodules, and its callers (None: other code)."""

    total: float = 0.0
    seconds: dict[nn.Module, float] = field(default_factory=dict)
    callers: dict[nn.Module, set[nn.Module | None]] = field(default_factory=dict)

    def share(self, module: nn.Module) -> float:
        """The share of the whole run that was spent in a module."""
        return self.seconds.get(module, 0.0) / self.total if self.total else 0.0

    def called_by(self, caller: nn.Module | None) -> list[nn.Module]:
        """The modules that `caller` called, the slowest first; for None, those that other code called."""
        modules = [module for module, callers in self.callers.items() if caller in callers]
        return sorted(modules, key=lambda module: -self.seconds.get(module, 0.0))


class Running(threading.local):
    """The modules that run on this thread, the outermost first, and the times when they began."""

    def __init__(self) -> None:
        self._calls: list[tuple[nn.Module, float]] = []

    def begin(self, module: nn.Module) -> list[nn.Module]:
        """Begin a call of a module; returns its callers."""
        callers = [caller for caller, _ in self._calls]
        self._calls.append((module, time.perf_counter()))
        return callers

    def end(self, module: nn.Module) -> float:
        """End the call of a module; returns its seconds, or 0.0 if the beginning was not seen."""
        while self._calls:  # a module that raised may have left entries
            last, start = self._calls.pop()
            if last is module:
                return time.perf_counter() - start
        return 0.0


_LEAST_S, _MOST_RUNS = 0.2, 5  # a shorter call is repeated, to limit noise


def call_tree(modules: Iterable[nn.Module], call: Callable[[], object]) -> CallTree:
    """Run `call`, several times if it is short, and record the calls of these modules.

    >>> import torch
    >>> inner = nn.ReLU()
    >>> outer = nn.Sequential(inner)
    >>> tree = call_tree([outer, inner], lambda: outer(torch.ones(1)))
    >>> tree.called_by(None) == [outer], tree.called_by(outer) == [inner]
    (True, True)
    """
    tree, running = CallTree(), Running()

    def before(module: nn.Module, _: Any) -> None:
        callers = running.begin(module)
        tree.callers.setdefault(module, set()).add(callers[-1] if callers else None)

    def after(module: nn.Module, _: Any, __: Any) -> None:
        tree.seconds[module] = tree.seconds.get(module, 0.0) + running.end(module)

    handles = []
    for module in modules:
        handles.append(module.register_forward_pre_hook(before, prepend=True))
        handles.append(module.register_forward_hook(after, always_call=True))
    start = time.perf_counter()
    try:
        for _ in range(_MOST_RUNS):
            call()
            if time.perf_counter() - start > _LEAST_S:
                break
    finally:
        for handle in handles:
            handle.remove()
    tree.total = time.perf_counter() - start
    return tree


_STORED = 6  # calls of one kind whose tensors are stored; of others, only sizes and times
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

Kind = tuple[Any, ...]  # equal for calls that one program can answer
Sizes = tuple[Any, ...]  # the shapes and integers of a call


@dataclass(frozen=True)
class RecordedCall:
    """One call: its arguments. Tensors are copied before the module runs."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def sizes(self) -> Sizes:
        """The shape of each tensor, and each integer."""
        return sizes_of(self.args, self.kwargs)


@dataclass
class CallsOfKind:
    """Calls with the same structure, dtypes and ranks, which differ only in sizes and integers.

    With `dynamic_shapes`, `intarsia.compile` lets what differs vary.
    """

    signature: inspect.Signature
    calls: list[RecordedCall] = field(default_factory=list)
    seen: dict[Sizes, int] = field(default_factory=dict)  # the number of calls with these sizes
    seconds: float = 0.0
    fills: bool = False  # the module added to a list, dictionary or cache among its arguments
    autocast: bool = False  # a call ran under autocast

    def __len__(self) -> int:
        return sum(self.seen.values())

    @property
    def example(self) -> RecordedCall:
        """The call to compile with: the most frequent one without a size of 1 where sizes vary."""
        varying = [
            place
            for place, values in enumerate(zip(*map(_flat, self.seen), strict=True))
            if len({*values}) > 1
        ]

        def rank(call: RecordedCall) -> tuple[int, int]:
            flat = _flat(call.sizes)
            return sum(flat[place] in (0, 1) for place in varying), -self.seen[call.sizes]

        return min(self.calls, key=rank)

    @property
    def dynamic_shapes(self) -> dict[str, Any] | None:
        """The sizes that vary, by parameter: each from the smallest to twice the largest recorded value."""
        example = self.example
        leaves, structure = pytree.tree_flatten((example.args, example.kwargs))
        columns = iter(list(zip(*self.seen, strict=True)))
        dims: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                shapes = next(columns)
                axes = {a: _range({s[a] for s in shapes}) for a in range(leaf.dim())}
                dims.append({a: dim for a, dim in axes.items() if dim is not None} or None)
            elif isinstance(leaf, int) and not isinstance(leaf, bool):
                dims.append(_range(set(next(columns))))
            else:
                dims.append(None)
        if not any(dims):
            return None
        args, kwargs = pytree.tree_unflatten(dims, structure)
        return dict(self.signature.bind(*args, **kwargs).arguments)


class Recorded(Sequence[RecordedCall]):
    """The calls of one module, in groups that one program can answer (`kinds`).

    As a sequence, it has the calls whose tensors are stored: a few of each kind.
    """

    def __init__(self, module: nn.Module) -> None:
        self._signature = inspect.signature(module.forward)
        self._kinds: dict[Kind, CallsOfKind] = {}
        self.total: int = 0
        self.seconds: float = 0.0
        self.tokens: int = 0  # the largest number in a call, including those in its cache

    @property
    def kinds(self) -> list[CallsOfKind]:
        """Groups of calls that differ only in sizes and integers, the most expensive first."""
        return sorted(self._kinds.values(), key=lambda kind: -kind.seconds)

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments to compile with."""
        return self._first.example.args

    @property
    def kwargs(self) -> dict[str, Any]:
        """The named arguments to compile with."""
        return self._first.example.kwargs

    @property
    def dynamic_shapes(self) -> dict[str, Any] | None:
        """The `dynamic_shapes` to compile with."""
        return self._first.dynamic_shapes

    @property
    def _first(self) -> CallsOfKind:
        if not self._kinds:
            raise InputError("no call was recorded")
        return self.kinds[0]

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallsOfKind:
        """Store a call, unless one with the same sizes is stored."""
        self.total += 1
        self.tokens = max(self.tokens, _tokens(kwargs))
        kind = self._kinds.setdefault(kind_of(args, kwargs), CallsOfKind(self._signature))
        sizes = sizes_of(args, kwargs)
        if sizes not in kind.seen and len(kind.calls) < _STORED:
            with torch.inference_mode(False):
                kind.calls.append(RecordedCall(*copied_call((args, kwargs))))
        kind.seen[sizes] = kind.seen.get(sizes, 0) + 1
        kind.autocast = kind.autocast or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        return kind

    def end(self, kind: CallsOfKind, sizes: Sizes, ended: Ended) -> None:
        """Record the end of a call of these sizes; remove the call if the module raised an error."""
        if not ended.failed:
            kind.fills = kind.fills or ended.fills
            kind.seconds += ended.seconds
            self.seconds += ended.seconds
            return
        self.total -= 1
        kind.seen[sizes] -= 1
        if kind.seen[sizes]:
            return
        del kind.seen[sizes]
        kind.calls = [call for call in kind.calls if call.sizes != sizes]
        if not kind.seen:
            self._kinds = {key: other for key, other in self._kinds.items() if other is not kind}

    def __len__(self) -> int:
        return sum(len(kind.calls) for kind in self._kinds.values())

    def __iter__(self) -> Iterator[RecordedCall]:
        return (call for kind in self.kinds for call in kind.calls)

    def __getitem__(self, place: Any) -> Any:
        return list(self)[place]


def kind_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind:
    """A key that is equal for calls that one program can answer.

    >>> kind_of((torch.ones(2), 3), {}) == kind_of((torch.ones(5), 4), {})
    True
    >>> kind_of((torch.ones(2), True), {}) == kind_of((torch.ones(2), False), {})
    False
    """
    leaves, structure = pytree.tree_flatten((args, kwargs))
    return str(structure), tuple(_trait(leaf) for leaf in leaves)


def sizes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sizes:
    """The shapes and integers of a call."""
    leaves = pytree.tree_leaves((args, kwargs))
    return tuple(
        tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
        if isinstance(leaf, torch.Tensor | int) and not isinstance(leaf, bool)
    )


def _tokens(kwargs: dict[str, Any]) -> int:
    """The tokens of a call of a transformers model: those in its cache, and the new ones."""
    cached = getattr(kwargs.get("past_key_values"), "get_seq_length", None)
    ids = kwargs.get("input_ids")
    return (int(cached()) if cached else 0) + (int(ids.shape[-1]) if isinstance(ids, torch.Tensor) else 0)


def _trait(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.dim(), leaf.device, leaf.requires_grad
    if isinstance(leaf, int) and not isinstance(leaf, bool):
        return int
    return (type(leaf), leaf) if isinstance(leaf, PLAIN) else type(leaf)


def _flat(sizes: Sizes) -> list[int]:
    return [n for size in sizes for n in (size if isinstance(size, tuple) else (size,))]


def _range(seen: set[int]) -> Any:
    if len(seen) < 2 or max(seen) < 1:  # a dimension is not negative, so such numbers do not vary
        return None
    return Dim.AUTO(min=max(0, min(seen)), max=2 * max(seen))


@contextmanager
def recording(model: nn.Module) -> Iterator[Recorded]:
    """Record how a model is called inside the block: arguments, shapes, dtypes and times.

    >>> import torch, intarsia
    >>> model = nn.Linear(4, 2)
    >>> with recording(model) as calls:
    ...     for size in (2, 3, 5):
    ...         _ = model(torch.ones(size, 4))
    >>> calls.total, calls.args[0].shape
    (3, torch.Size([2, 4]))
    >>> fast = intarsia.compile(model, calls.args, calls.kwargs, dynamic_shapes=calls.dynamic_shapes)
    >>> fast(torch.ones(4, 4)).shape
    torch.Size([4, 2])
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"recording(...) takes a module, not a {type(model).__name__}")
    calls = Recorded(model)
    handles = watch(model, calls)
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def watch(module: nn.Module, calls: Recorded) -> list[RemovableHandle]:
    """Hooks that add every call of the module to `calls`, except those that raise."""

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Ended], None]:
        return partial(calls.end, calls.begin(args, kwargs), sizes_of(args, kwargs))

    return watch_calls(module, begin)
