"""Objects that a model returns, such as a cache: the tensors in them are results, the rest is their form.

`torch.export` knows nested results by types that are registered with it. Objects of other classes are opened:
an `Opened` stands for one, its tensors and integers are leaves, and unflattening makes the object again, of
its class and with its attributes, without calling any code of it.

transformers offers to register its `DynamicCache` with pytree, which loses what is not a tensor (the count
of a sliding layer), changes the type for the whole process, and serves one class.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from intarsia.capture.example import Call, copied_call
from intarsia.capture.object_form import Form, NoFormError, form_from_json, form_of, form_to_json, restored
from intarsia.capture.protect import undisturbed
from intarsia.errors import CaptureError

# What transformers registers of its caches, on demand, loses the counts in them.
_ALWAYS_OPENED = ("transformers.cache_utils",)
_kept_open: ContextVar[bool] = ContextVar("_kept_open", default=False)


@dataclass(frozen=True)
class Opened:
    """An object as its leaves and its form; in results, and nowhere else."""

    leaves: Sequence[Any]
    form: Form
    parts: Sequence[Any] = field(default=(), compare=False)  # it and all in it that can be changed


def open_objects(result: Any) -> Any:
    """The result with an `Opened` for every object that holds tensors and is of no registered type.

    What has no form (it has slots, or holds a module, a function, a file) stays as it is, and all do where
    one of them, or a part, is in two places: made again, there would be two.

    >>> class Cache:
    ...     def __init__(self, keys):
    ...         self.keys, self.filled = [keys], True
    >>> leaves, structure = pytree.tree_flatten(open_objects({"cache": Cache(torch.ones(2))}))
    >>> leaves
    [tensor([1., 1.])]
    >>> made = pytree.tree_unflatten([torch.zeros(1)], structure)["cache"]
    >>> type(made).__name__, made.keys, made.filled
    ('Cache', [tensor([0.])], True)
    """
    opened, objects = _opened_in(result)
    return result if _is_in_two_places(objects, result) else opened


def is_cache(value: Any) -> bool:
    """Whether it is a cache of transformers: opened in results, and no input that a graph could change."""
    return type(value).__module__ in _ALWAYS_OPENED


@contextlib.contextmanager
def opening(model: nn.Module, call: Call) -> Iterator[None]:
    """Under this, the model gives its results opened.

    At the end, if there were any, the model is run twice: CaptureError where it gives one of the same objects
    again, in which the next call's caller would look for what happened since, or other plain values.
    """
    objects: list[Opened] = []

    def opened(_module: nn.Module, _args: Any, result: Any) -> Any:
        made, objects[:] = _opened_in(result)
        if _is_in_two_places(objects, result):
            raise CaptureError(
                f"{type(model).__name__} returns one object, or one of its attributes, in two places"
            )
        return made

    hook = model.register_forward_hook(opened)
    try:
        yield
    finally:
        hook.remove()
    if not objects:
        return
    # Not of the trace: export gives the model copies of its lists afterwards.
    first, again = _opened_by(model, call), _opened_by(model, call)
    if not len(objects) == len(first) == len(again):
        raise CaptureError(f"{type(model).__name__} returns other objects at each call")
    held = {id(part) for one in first for part in one.parts}
    for traced, one, other in zip(objects, first, again, strict=True):
        name = f"{type(model).__name__} gives a {type(one.parts[0]).__name__}"
        if not held.isdisjoint(map(id, other.parts)):
            raise CaptureError(f"{name} that it keeps, or that holds what it keeps")
        for answer in (one, other):
            if traced.form != answer.form or not all(map(_are_alike, traced.leaves, answer.leaves)):
                raise CaptureError(f"{name} that holds other values at each call")


def _opened_by(model: nn.Module, call: Call) -> list[Opened]:
    args, kwargs = copied_call(call)
    with undisturbed(model):
        return _opened_in(model(*args, **kwargs))[1]


def _are_alike(one: Any, other: Any) -> bool:
    """Whether plain integers are equal; of a size that varies a trace has no integer."""
    return type(one) is not int or one == other


@contextlib.contextmanager
def kept_open() -> Iterator[None]:
    """Under this, unflattening gives `Opened` as it is: torch flattens again what it traces."""
    before = _kept_open.set(True)
    try:
        yield
    finally:
        _kept_open.reset(before)


def _closed(leaves: Iterable[Any], form: Form) -> Any:
    return Opened([*leaves], form) if _kept_open.get() else restored(form, leaves)


def _opened_in(result: Any) -> tuple[Any, list[Opened]]:
    """The result with its objects opened, and what was."""
    objects: list[Opened] = []

    def opened(value: Any) -> Any:
        if isinstance(value, torch.Tensor | nn.Module) or not hasattr(value, "__dict__"):
            return value
        try:
            form, leaves, parts = form_of(value)
        except NoFormError:
            return value
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return value
        objects.append(Opened(leaves, form, parts))
        return objects[-1]

    return pytree.tree_map(opened, result, is_leaf=is_cache), objects


def _is_in_two_places(objects: Sequence[Opened], result: Any) -> bool:
    """Whether an object of a result, or something in it that can be changed, is there twice."""
    places = [id(part) for one in objects for part in one.parts]
    others = {*map(id, _containers(result))} if objects else set()
    return len(others.union(places)) < len(others) + len(places)


def _containers(value: Any) -> list[Any]:
    """The lists and dictionaries of a result."""
    if isinstance(value, dict):
        return [value, *(inner for item in value.values() for inner in _containers(item))]
    if isinstance(value, list | tuple):
        own = [value] if isinstance(value, list) else []
        return [*own, *(inner for item in value for inner in _containers(item))]
    return []


pytree.register_pytree_node(
    Opened,
    lambda opened: (list(opened.leaves), opened.form),
    _closed,
    serialized_type_name="intarsia.Opened",
    to_dumpable_context=form_to_json,
    from_dumpable_context=form_from_json,
)
