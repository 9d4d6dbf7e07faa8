"""Objects that a model returns, such as a cache: the tensors in them are results, the rest is their form.

`torch.export` knows nested results by types that are registered with it. Objects of other classes are opened:
an `Opened` stands for one, its tensors and integers are leaves, and unflattening makes the object again, of
its class and with its attributes, without calling any code of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from intarsia.capture.object_form import Form, NoFormError, form_from_json, form_of, form_to_json, restored

# What transformers registers of its caches, on demand, loses the counts in them.
_ALWAYS_OPENED = ("transformers.cache_utils",)
_kept_open: ContextVar[bool] = ContextVar("_kept_open", default=False)


@dataclass(frozen=True)
class Opened:
    """An object as its leaves and its form; in results, and nowhere else."""

    leaves: Sequence[Any]
    form: Form


def open_objects(result: Any) -> Any:
    """The result with an `Opened` for every object that holds tensors and is of no registered type.

    What has no form (it has slots, or holds a module, a function, a file) stays as it is.

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
    return pytree.tree_map(_opened, result, is_leaf=is_cache)


def is_cache(value: Any) -> bool:
    """Whether it is a cache of transformers: opened in results, and no input that a graph could change."""
    return type(value).__module__ in _ALWAYS_OPENED


@contextlib.contextmanager
def opening(model: nn.Module) -> Iterator[None]:
    """Under this, calls of the model give their results opened.

    What the model itself keeps is left: whoever gets it twice gets one object, and finds in it what was
    written to it since.
    """

    def opened(_module: nn.Module, _args: Any, result: Any) -> Any:
        kept = _kept_by(model)
        return pytree.tree_map(
            lambda leaf: leaf if id(leaf) in kept else _opened(leaf), result, is_leaf=is_cache
        )

    hook = model.register_forward_hook(opened)
    try:
        yield
    finally:
        hook.remove()


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


def _opened(value: Any) -> Any:
    if isinstance(value, torch.Tensor | nn.Module) or not hasattr(value, "__dict__"):
        return value
    try:
        form, leaves = form_of(value)
    except NoFormError:
        return value
    return Opened(leaves, form) if any(isinstance(leaf, torch.Tensor) for leaf in leaves) else value


def _kept_by(model: nn.Module) -> set[int]:
    """What modules hold as attributes, and in lists and dictionaries of theirs."""
    kept = set()
    for module in model.modules():
        for value in vars(module).values():
            items = [*value.values()] if isinstance(value, dict) else value
            kept |= {id(value), *(map(id, items) if isinstance(items, list | tuple) else ())}
    return kept


pytree.register_pytree_node(
    Opened,
    lambda opened: (list(opened.leaves), opened.form),
    _closed,
    serialized_type_name="intarsia.Opened",
    to_dumpable_context=form_to_json,
    from_dumpable_context=form_from_json,
)
