"""`enforce_tensor_types`: convert the arguments of a raw converter to the types that it takes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from intarsia.errors import ConversionError
from intarsia.network import Tensor
from intarsia.network import functional as F

Types = tuple[type, ...]


def enforce_tensor_types(
    types: Mapping[int | str, Types], promote: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Convert arguments of a raw converter to one of the given types, by position (int) or keyword (str).

    With `promote`, a value of another type is converted to the first type that can hold it. Without it, the
    node is refused. Missing arguments and None are not changed.

    >>> @enforce_tensor_types({0: (Tensor,)})
    ... def double(ctx, target, args, kwargs, name):
    ...     return args[0] + args[0]
    """
    for key, wanted in types.items():
        if not wanted or any(t not in (Tensor, np.ndarray, torch.Tensor) for t in wanted):
            raise ConversionError(
                f"argument {key!r} must list Tensor, np.ndarray or torch.Tensor, not {wanted}"
            )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def enforced(ctx: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
            positional, named = list(args), dict(kwargs)
            for key, wanted in types.items():
                if isinstance(key, int) and key < len(positional):
                    positional[key] = _enforce(key, positional[key], wanted, promote)
                elif isinstance(key, str) and key in named:
                    named[key] = _enforce(key, named[key], wanted, promote)
            return function(ctx, target, tuple(positional), named, name)

        return enforced

    return decorate


def _enforce(key: int | str, value: Any, wanted: Types, promote: bool) -> Any:
    if value is None or isinstance(value, wanted):
        return value
    if promote:
        for kind in wanted:
            if kind is Tensor:
                return F.constant(value)
            if isinstance(value, Tensor):
                continue  # a tensor of the network has no value yet
            if kind is np.ndarray:
                return value.numpy(force=True) if isinstance(value, torch.Tensor) else np.asarray(value)
            return torch.as_tensor(value)
    names = " or ".join(kind.__name__ for kind in wanted)
    raise ConversionError(f"argument {key!r} is a {type(value).__name__}; {names} is wanted")
