"""Recorded calls of modules, and the sizes that vary between them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from intarsia.capture.example import copied_call
from intarsia.capture.watch import Ended, watch_calls
from intarsia.errors import InputError

_STORED = 6  # calls of one kind whose tensors are stored; of others, only sizes and times
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

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

    signature: inspect.Signature | None = None
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
        if not any(dims) or self.signature is None:
            return None
        args, kwargs = pytree.tree_unflatten(dims, structure)
        return dict(self.signature.bind(*args, **kwargs).arguments)


class Recorded(Sequence[RecordedCall]):
    """The calls of one module, in groups that one program can answer (`kinds`).

    As a sequence, it has the calls whose tensors are stored: a few of each kind.
    """

    def __init__(self, signature: inspect.Signature | None = None) -> None:
        self._signature = signature
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


def foreign(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The type of an argument that capture does not support, such as a cache; None if there is none."""
    leaves = pytree.tree_leaves((args, kwargs))
    strange = [leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, *_PLAIN))]
    return type(strange[0]).__name__ if strange else None


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
    return (type(leaf), leaf) if isinstance(leaf, _PLAIN) else type(leaf)


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
    calls = new_recorded(model)
    handles = watch(model, calls)
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def new_recorded(module: nn.Module) -> Recorded:
    """An empty record for the calls of a module."""
    return Recorded(inspect.signature(module.forward))


def watch(module: nn.Module, calls: Recorded) -> list[RemovableHandle]:
    """Hooks that add every call of the module to `calls`, except those that raise."""

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Ended], None]:
        return partial(calls.end, calls.begin(args, kwargs), sizes_of(args, kwargs))

    return watch_calls(module, begin)
