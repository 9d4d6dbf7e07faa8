"""Whether a model is as it was when it was compiled: weights, modules, hooks, modes and plain attributes.

    contents     torch's version counters, at every call
                 steps of optimizers, at every call: fused ones do not count their writes (torch 2.13)
                 samples of each weight's bytes, in turns: torch does not count writes by `p.data` or numpy
    structure    a replaced weight, a module, a hook, a mode, an attribute: in turns, or all at once

Samples are read on the CPU alone, since on a GPU a call would wait for its kernels. The caller decides what
follows from a change: a compiled module raises or warns, a tuned one runs its own forward, the backend
compiles again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from operator import attrgetter, call, is_
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from intarsia.errors import some_of
from intarsia.plain_tensors import plain_tensors
from intarsia.runtime.settings import Attributes, Settings, Table, attributes_of

_T = TypeVar("_T")

# torch's counter of in-place changes, which has no public name. A tensor made in inference mode has none.
VERSION = attrgetter("_version")

# Everything is checked within this many calls. Of 262 weights, an eighth takes 15 us, and all take 120 us.
TURNS = 8
_LEAST = 3  # the smallest number of weights and modules that are checked together
_WORDS = 64  # of four bytes that are sampled of a weight, which takes 0.3 us
# A large weight is sampled in few places: where a file is mapped, Linux maps 64 KB around each.
_RUNS, _LARGE = 4, 1 << 18

_ROOT = "the model itself"

# transformers adds hooks to a model's layers at its first run; they act only if hidden states are requested.
_IDLE_HOOKS = "transformers.utils.output_capturing"


class Kind(Enum):
    """The kind of a change, as a clause that follows the name of what changed."""

    WRITTEN = "was written to"
    REPLACED = "was replaced"
    MODULES = "has other modules than when it was compiled"
    HOOK = "has a hook that was added after compiling"
    MODE = "has another training mode than when it was compiled"
    SETTING = "has another value than when it was compiled"

    @property
    def is_final(self) -> bool:
        """Whether the program can never fit again. Hooks and settings may be restored."""
        return self in (Kind.WRITTEN, Kind.REPLACED, Kind.MODULES)


@dataclass(frozen=True)
class Change:
    """A change of the model. `names` are all weights that were written to, or what else changed."""

    kind: Kind
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.what} {self.kind.value}"

    @property
    def what(self) -> str:
        """The first names, as text."""
        return some_of(self.names)


@dataclass(frozen=True)
class Weight:
    """A tensor that was compiled, with its name, and its place in a module's table if it has one.

    Of one that `is_state`, to which calls write, only a replacement is a change.
    """

    name: str
    tensor: torch.Tensor
    table: Table | None = None
    key: str = ""
    is_state: bool = False


def weights_of(model: nn.Module) -> Iterator[Weight]:
    """Each parameter, buffer and tensor attribute of a model."""
    for path, module in model.named_modules():
        for table in (module._parameters, module._buffers, module.__dict__):
            if not isinstance(table, dict):  # of TorchScript
                continue
            for key, tensor in table.items():
                if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                    yield Weight(f"{path}.{key}" if path else key, tensor, table, key)


class Freshness:
    """The weights and modules that a program was compiled from, and whether they have changed.

    The modules of `root` are watched, too. A program that is `in_place` of the root's forward runs within the
    root's own hooks, and depends on the modes of modules. The model is not kept alive; `gone` is called when
    a weight is deleted.
    """

    def __init__(
        self,
        weights: Iterable[Weight],
        root: nn.Module | None = None,
        *,
        in_place: bool = False,
        gone: Callable[[object], None] | None = None,
    ) -> None:
        self._weights = [_Watched(weight, gone) for weight in weights]
        self._counted = [part for weight in self._weights for part in weight.counted]
        self._total = sum(map(VERSION, self._counted))  # counters only grow, so the sum suffices
        self._stepped: set[int] = set()  # weights that an optimizer has updated
        self._by_storage: dict[int, list[int]] = {}
        for place, weight in enumerate(self._weights):
            for part in weight.parts:
                self._by_storage.setdefault(part.untyped_storage().data_ptr(), []).append(place)
        modules = [] if root is None else list(root.named_modules())
        attributes = [] if root is None else list(attributes_of(root, in_place=in_place))
        turns = max(1, min(TURNS, max(len(self._weights), len(modules)) // _LEAST))
        self._shares = [
            _Share(
                _part(self._weights, turn, turns),
                _part(modules, turn, turns),
                _part(attributes, turn, turns),
                in_place,
            )
            for turn in range(turns)
        ]
        self._turn = 0
        self._root = None if root is None else weakref.ref(root, _forgetting(weakref.ref(self)))
        _watch_steps()
        _watching.add(self)

    def contents_change(self, *, thorough: bool = False) -> Change | None:
        """The weights that were written to: all are counted; those of this turn, or all, are sampled."""
        is_fresh = not self._stepped and sum(map(VERSION, self._counted)) == self._total
        if thorough:
            is_fresh = is_fresh and all(share.is_sampled_alike() for share in self._shares)
        elif is_fresh:
            is_fresh = self._shares[self._turn].is_sampled_alike()
            if is_fresh:  # otherwise the next call reads the same samples, and sees the same change
                self.advance()
        if is_fresh:
            return None
        names = (w.name for place, w in enumerate(self._weights) if place in self._stepped or w.is_written())
        return Change(Kind.WRITTEN, tuple(names))

    def advance(self) -> None:
        """Go to the next turn."""
        self._turn = self._turn + 1 if self._turn + 1 < len(self._shares) else 0

    def structure_change(self, *, thorough: bool = False) -> Change | None:
        """The first change of structure in this turn, or in all of them."""
        for share in self._shares if thorough else (self._shares[self._turn],):
            change = share.change()
            if change is not None:
                return change
        return None

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these tensors are the weights, in their order and at their memory addresses."""
        start = 0
        for share in self._shares:
            if not share.holds(tensors[start : start + len(share.weights)]):
                return False
            start += len(share.weights)
        return True

    def changed(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """The places of those `tensors` that are not the weights, or were written to."""
        pairs = enumerate(zip(self._weights, tensors, strict=True))
        return [i for i, (w, now) in pairs if i in self._stepped or not w.holds(now) or w.is_written()]

    def note_step(self, storages: set[int]) -> None:
        """Record that an optimizer has written to these storages."""
        for storage in storages & self._by_storage.keys():
            self._stepped.update(self._by_storage[storage])

    def forget(self) -> None:
        """Release the modules, when the model is deleted."""
        for share in self._shares:
            share.forget()


def _forgetting(freshness: weakref.ref[Freshness]) -> Callable[[object], None]:
    def forget(_: object) -> None:
        if (alive := freshness()) is not None:
            alive.forget()

    return forget


def _part(items: Sequence[_T], turn: int, turns: int) -> Sequence[_T]:
    return items[len(items) * turn // turns : len(items) * (turn + 1) // turns]


class _Watched:
    """A weight, with the data that show whether its contents have changed."""

    def __init__(self, weight: Weight, gone: Callable[[object], None] | None) -> None:
        tensor = weight.tensor
        self.name = weight.name
        self.place = None if weight.table is None else (weight.table, weight.key)
        self.ref = weakref.ref(tensor, gone)
        own = plain_tensors(tensor)
        self.is_plain = len(own) == 1 and own[0] is tensor
        self.parts = [part.detach() for part in own]  # a detached tensor shares memory and counter
        self.addresses = [part.data_ptr() for part in self.parts]
        # A write to a subclass counts at the subclass, not at its parts.
        wholes = self.parts if self.is_plain else [tensor.detach(), *self.parts]
        self.counted = [part for part in wholes if not (part.is_inference() or weight.is_state)]
        self._counts = [VERSION(part) for part in self.counted]
        sampled = [] if weight.is_state else self.parts
        self.samples = [sample for part in sampled for sample in _samples(part)]
        self.values = [sample.tobytes() for sample in self.samples]

    def holds(self, tensor: torch.Tensor | None) -> bool:
        """Whether a tensor is the weight, at the same memory address."""
        if tensor is None or tensor is not self.ref():
            return False
        return [part.data_ptr() for part in plain_tensors(tensor)] == self.addresses

    def is_written(self) -> bool:
        """Whether the contents have changed, by torch's counter or by the samples."""
        values = [sample.tobytes() for sample in self.samples]
        return [VERSION(part) for part in self.counted] != self._counts or values != self.values


class _Share:
    """The checks of one turn: a few comparisons of lists, which run in C."""

    def __init__(
        self,
        weights: Sequence[_Watched],
        modules: Sequence[tuple[str, nn.Module]],
        attributes: Sequence[Attributes],
        in_place: bool,
    ) -> None:
        self.weights = weights
        self._refs = [weight.ref for weight in weights]
        self._addresses = [weight.addresses[0] for weight in weights if weight.is_plain]
        self._samples = [sample for weight in weights for sample in weight.samples]
        self._values = [value for weight in weights for value in weight.values]
        # A weight that no module has registered has no place, and cannot be replaced.
        places = [weight.place for weight in weights]
        self._places = places if any(place is not None for place in places) else []
        self._modules = modules if in_place else []
        self._modes = [module.training for _, module in self._modules]
        self._children = [
            (path, part._modules, tuple(part._modules.values())) for path, part in modules if part._modules
        ]
        hooked = [(path, part) for path, part in modules if path or not in_place]
        self._hooks = [
            (path, table) for path, p in hooked for table in (p._forward_hooks, p._forward_pre_hooks)
        ]
        self._hook_tables = [table for _, table in self._hooks]
        self._hook_counts = [*map(len, self._hook_tables)]
        self._user_hooks = [*map(_user_hooks, self._hook_tables)]
        self._settings = Settings(attributes)

    def is_sampled_alike(self) -> bool:
        return [sample.tobytes() for sample in self._samples] == self._values

    def holds(self, tensors: Sequence[torch.Tensor | None]) -> bool:
        """Whether these tensors are the weights, at their memory addresses."""
        if not all(map(is_, tensors, map(call, self._refs))):
            return False
        if len(self._addresses) == len(self.weights):
            return [*map(torch.Tensor.data_ptr, tensors)] == self._addresses  # type: ignore[arg-type]
        return all(weight.holds(tensor) for weight, tensor in zip(self.weights, tensors, strict=True))

    def change(self) -> Change | None:
        if self._places:
            now = [
                ref() if place is None else place[0].get(place[1])
                for ref, place in zip(self._refs, self._places, strict=True)
            ]
            if not self.holds(now):
                names = (w.name for w, tensor in zip(self.weights, now, strict=True) if not w.holds(tensor))
                return Change(Kind.REPLACED, tuple(names))
        for path, table, children in self._children:
            if tuple(table.values()) != children:
                return Change(Kind.MODULES, (path or _ROOT,))
        modes = [module.training for _, module in self._modules]
        if modes != self._modes:
            pairs = zip(self._modules, modes, self._modes, strict=True)
            return Change(
                Kind.MODE, tuple(path or _ROOT for (path, _), now, before in pairs if now != before)
            )
        if [*map(len, self._hook_tables)] != self._hook_counts and (change := self._hook_change()):
            return change
        name = self._settings.changed()
        return None if name is None else Change(Kind.SETTING, (name,))

    def _hook_change(self) -> Change | None:
        for (path, table), before in zip(self._hooks, self._user_hooks, strict=True):
            if _user_hooks(table) != before:
                return Change(Kind.HOOK, (path or _ROOT,))
        self._hook_counts = [*map(len, self._hook_tables)]
        return None

    def forget(self) -> None:
        for weight in self.weights:
            weight.place = None
        self._places, self._modules, self._modes, self._children = [], [], [], []
        self._hooks, self._hook_tables, self._hook_counts, self._settings = [], [], [], Settings([])


def _user_hooks(table: dict[int, Any]) -> int:
    """The number of hooks, without those of transformers that act only for calls without a program."""
    return sum(getattr(hook, "__module__", "") != _IDLE_HOOKS for hook in table.values())


def _samples(part: torch.Tensor) -> list[Any]:
    """A sample of a tensor's memory as a numpy array; nothing if reading would have to wait."""
    if part.device.type != "cpu" or part.layout is not torch.strided or not part.numel():
        return []
    storage, start = part.untyped_storage(), part.storage_offset() * part.element_size()
    reach = sum((size - 1) * step for size, step in zip(part.shape, part.stride(), strict=True)) + 1
    memory = torch.empty(0, dtype=torch.uint8).set_(storage, start, (reach * part.element_size(),))  # type: ignore[call-overload]
    octets = memory.numpy()
    if len(octets) < 4 * _WORDS:
        return [octets]
    words = octets[: len(octets) // 4 * 4].view("u4")
    # The step is odd: one that divides the length of a row would read the same column of every row.
    if len(octets) < _LARGE:
        return [words[:: len(words) // _WORDS | 1]]
    step = len(words) // _RUNS - 1 | 1
    return [words[: _RUNS * step].reshape(_RUNS, step)[:, : _WORDS // _RUNS]]


# Steps of optimizers: torch calls the hook after every step of every optimizer in the process.

_watching: weakref.WeakSet[Freshness] = weakref.WeakSet()


@cache
def _watch_steps() -> None:
    register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: Optimizer, *_: Any) -> None:
    watching = list(_watching)
    if not watching:
        return
    stepped = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    storages = {part.untyped_storage().data_ptr() for p in stepped for part in plain_tensors(p)}
    for freshness in watching:
        freshness.note_step(storages)
