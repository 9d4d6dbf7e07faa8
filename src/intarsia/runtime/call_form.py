"""The form of a call: a call may differ from the example in how it passes the same arguments.

Arguments may be passed by position or by name, defaults may be omitted, and dicts may have their keys in any
order.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from intarsia.errors import InputError


def leaves_of(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    form: pytree.TreeSpec,
    signature: inspect.Signature | None,
    purpose: str = "compiled",
) -> list[Any]:
    """The leaves of a call in the order of `form`, the example's. InputError names what differs.

    `signature` is that of the model's `forward`, if it is known; `purpose` begins the second half of errors.

    >>> _, form = pytree.tree_flatten(((1, {"x": 2, "y": 3}), {}))
    >>> leaves_of((4, {"y": 6, "x": 5}), {}, form, None)
    [4, 5, 6]
    """
    args_form, named_form = children(form)
    count, named = len(children(args_form)), list(named_form.context)
    if (len(args), set(kwargs)) != (count, set(named)):
        args, kwargs = _rebind(args, kwargs, count, named, signature, purpose)
    ordered = {name: kwargs[name] for name in named}
    leaves, own = pytree.tree_flatten((tuple(args), ordered))
    if own == form:
        return leaves
    parameters = list(signature.parameters) if signature is not None else []
    names = [*(parameters[i] if i < len(parameters) else f"argument {i}" for i in range(count)), *named]
    values, forms = [*args, *ordered.values()], [*children(args_form), *children(named_form)]
    return [v for one in zip(names, values, forms, strict=True) for v in _leaves(*one, purpose)]


def _leaves(name: str, value: Any, form: pytree.TreeSpec, purpose: str) -> list[Any]:
    if form.is_leaf():
        return [value]
    below = children(form)
    if form.type in (dict, OrderedDict) and isinstance(value, Mapping):
        keys = list(form.context)
        if set(value) != set(keys):
            raise InputError(f"{name} has the keys {list(value)}; {purpose} for {keys}")
        places, values = [f"{name}[{key!r}]" for key in keys], [value[key] for key in keys]
    else:
        values, own = pytree.tree_flatten(value, is_leaf=lambda item: item is not value)
        if own.is_leaf() or (own.type, own.context, len(values)) != (form.type, form.context, len(below)):
            wanted = f"a {form.type.__name__} of {len(below)}"
            raise InputError(f"{name} is {_kind(value, own)}; {purpose} for {wanted}")
        places = [f"{name}[{i}]" for i in range(len(values))]
    return [v for one in zip(places, values, below, strict=True) for v in _leaves(*one, purpose)]


def _kind(value: Any, own: pytree.TreeSpec) -> str:
    if own.is_leaf():
        return shown(value)
    return f"a {type(value).__name__} of {len(children(own))}"


def _rebind(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    count: int,
    named: Sequence[str],
    signature: inspect.Signature | None,
    purpose: str,
) -> tuple[list[Any], Mapping[str, Any]]:
    """The same call with `count` arguments by position and those of `named` by name."""
    if signature is not None:
        try:
            bound = dict(signature.bind(*args, **kwargs).arguments)
        except TypeError as error:
            raise InputError(f"the call does not fit the model: {error}") from error
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                bound |= bound.pop(parameter.name, {})
        bound = _with_defaults(signature, bound, count, named, purpose)
        order = [name for name in signature.parameters if name in bound and name not in named]
        if len(order) == count and set(bound) == {*order, *named}:
            return [bound[name] for name in order], bound
    has, expected = _listed(len(args), kwargs), _listed(count, named)
    raise InputError(f"the call has {has}; {purpose} for {expected}")


def _listed(count: int, named: Mapping[str, Any] | Sequence[str]) -> str:
    plural = "" if count == 1 else "s"
    return f"{count} positional argument{plural}" + (f" and {', '.join(named)}" if named else "")


def _with_defaults(
    signature: inspect.Signature,
    bound: dict[str, Any],
    positional: int,
    named: Sequence[str],
    purpose: str,
) -> dict[str, Any]:
    """The arguments of the example: defaults for omitted ones, and no others that repeat their default."""
    plain = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    wanted = [*[p.name for p in plain if p.name not in named][:positional], *named]
    filled = dict(bound)
    for parameter in plain:
        name, default = parameter.name, parameter.default
        if default is parameter.empty:
            continue
        if name in wanted:
            filled.setdefault(name, default)
        elif name in bound and is_same(bound[name], default):
            del filled[name]
        elif name in bound:
            raise InputError(
                f"argument {name} is {shown(bound[name])}; {purpose} for its default, {default!r}"
            )
    return filled


def is_same(value: Any, default: Any) -> bool:
    """Whether a plain value equals another one of its type; NaN equals itself, and -0.0 is not 0.0."""
    if value is default:
        return True
    if type(value) is type(default) is float:
        return repr(value) == repr(default)  # -0.0 equals 0.0, and NaN does not equal itself
    plain = (bool, int, float, str, bytes, tuple, torch.dtype, torch.device)
    return isinstance(default, plain) and type(value) is type(default) and bool(value == default)


def shown(value: Any) -> str:
    """A value in an error."""
    return "a tensor" if isinstance(value, torch.Tensor) else repr(value)


def children(spec: pytree.TreeSpec) -> list[pytree.TreeSpec]:
    """The structures one level below this one."""
    method = getattr(spec, "children", None)  # torch 2.11 may have only the field `children_specs`
    return list(method()) if callable(method) else list(spec.children_specs)
