"""How a call is written: which arguments by position, which by name, which left to their defaults."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from intarsia.errors import InputError


def with_defaults(
    signature: inspect.Signature, given: dict[str, Any], positional: int, named: Sequence[str]
) -> dict[str, Any]:
    """The arguments compiled for: defaults for those left out, none that only repeats its default."""
    plain = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    wanted = [*[p.name for p in plain if p.name not in named][:positional], *named]
    filled = dict(given)
    for parameter in plain:
        name, default = parameter.name, parameter.default
        if default is parameter.empty:
            continue
        if name in wanted:
            filled.setdefault(name, default)
        elif name in given and _is_same(given[name], default):
            del filled[name]
        elif name in given:
            value = given[name]
            shown = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
            raise InputError(f"argument {name} is {shown}; compiled for its default, {default!r}")
    return filled


def _is_same(value: Any, default: Any) -> bool:
    if value is default:
        return True
    plain = (bool, int, float, str, bytes, tuple, torch.dtype, torch.device)
    return isinstance(default, plain) and type(value) is type(default) and bool(value == default)


def split_spec(spec: pytree.TreeSpec) -> tuple[int, list[str]]:
    """How many arguments are given by position, and the names of the others."""
    args, kwargs = children(spec)
    return len(children(args)), list(kwargs.context)


def children(spec: pytree.TreeSpec) -> list[pytree.TreeSpec]:
    """The structures right below this one."""
    found = getattr(spec, "children", None)  # torch 2.11 may have the field alone
    return list(found()) if callable(found) else list(spec.children_specs)


def flat_arguments(spec: pytree.TreeSpec) -> int:
    """The number of positional inputs if all are plain leaves and none is named, else -1."""
    args, kwargs = children(spec)
    leaves = all(child.is_leaf() for child in children(args))
    return len(children(args)) if leaves and not kwargs.context else -1
