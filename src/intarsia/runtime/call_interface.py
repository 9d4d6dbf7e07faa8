"""How a call of a compiled module maps onto its graph: structure, defaults, checks, order of inputs."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils import _pytree as pytree

from intarsia.capture.size_guards import check_guards, read_guards
from intarsia.errors import InputError
from intarsia.lower import Lowered
from intarsia.runtime.input_checks import Check, FixedInput, check_inputs, checks_of, fixed_inputs


@dataclass(frozen=True)
class CallInterface:
    """What a call must look like, and which of its values is which input of the graph.

    `checks` say what each value of the flattened call must be; `signature` is that of the model's `forward`,
    where it is known, so that arguments may be given by position or by name.
    """

    lowered: Lowered
    checks: tuple[Check, ...]
    signature: inspect.Signature | None = None

    @staticmethod
    def of(
        lowered: Lowered, signature: inspect.Signature | None, checks: Sequence[Check] | None = None
    ) -> CallInterface:
        """The interface of a lowered graph; `checks` are read from the graph unless a file has them."""
        return CallInterface(lowered, checks_of(lowered) if checks is None else tuple(checks), signature)

    @cached_property
    def plain_arguments(self) -> int:
        """The number of positional inputs if all are plain leaves and none is named, else -1."""
        args, kwargs = children(self.lowered.in_spec)
        leaves = all(child.is_leaf() for child in children(args))
        return len(children(args)) if leaves and not kwargs.context else -1

    @cached_property
    def in_order(self) -> bool:
        """Whether the flattened call is the graph's inputs: no buffers between them, none left out."""
        return [item.index for item in self.lowered.inputs] == list(range(len(self.checks)))

    @cached_property
    def fixed(self) -> list[FixedInput] | None:
        """Dtype, shape and device of every input, if a call is just tensors of fixed shapes."""
        if self.plain_arguments < 0 or not self.in_order or self._guards:
            return None
        return fixed_inputs(self.checks)

    @cached_property
    def _guards(self) -> Any:
        places = {item.name: item.index for item in self.lowered.inputs if item.index is not None}
        return read_guards(self.lowered.guards, places)

    def check(self, flat: list[Any]) -> None:
        """Raise InputError, naming the input, unless a flattened call fits what was compiled."""
        check_inputs(self.checks, flat, self.lowered.range_constraints)
        if self._guards:
            check_guards(self._guards, flat)

    def feed(self, flat: list[Any]) -> list[Any]:
        """The graph's inputs: the caller's, and the buffers that the model changes."""
        if self.in_order:
            return flat
        buffers = self.lowered.buffers
        return [buffers[i.buffer] if i.buffer else flat[i.index or 0] for i in self.lowered.inputs]

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """A call as a list, in the order of `checks`; InputError where it has another structure."""
        if self.plain_arguments == len(args) and not kwargs:
            return list(args)
        spec = self.lowered.in_spec
        positional, named = split_spec(spec)
        if (len(args), set(kwargs)) != (positional, set(named)):
            args, kwargs = self._rebind(args, kwargs, positional, named)
        flat, structure = pytree.tree_flatten((args, {name: kwargs[name] for name in named}))
        if structure != spec:
            raise InputError(f"the call has the structure {structure}; compiled for {spec}")
        return flat

    def _rebind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], positional: int, named: list[str]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same call with arguments passed by position or name as when compiled."""
        expected = f"{positional} positional arguments" + (f" and {', '.join(named)}" if named else "")
        if self.signature is not None:
            try:
                bound = dict(self.signature.bind(*args, **kwargs).arguments)
            except TypeError as error:
                raise InputError(f"the call does not fit the model: {error}") from error
            bound = with_defaults(self.signature, bound, positional, named)
            order = [name for name in self.signature.parameters if name in bound]
            if len(order) == positional + len(named) and all(name in bound for name in named):
                rest = [name for name in order if name not in named]
                return tuple(bound[name] for name in rest), {name: bound[name] for name in named}
        has = f"{len(args)} positional arguments" + (f" and {', '.join(kwargs)}" if kwargs else "")
        raise InputError(f"the call has {has}; compiled for {expected}")


def with_defaults(
    signature: inspect.Signature, bound: dict[str, Any], positional: int, named: Sequence[str]
) -> dict[str, Any]:
    """The arguments compiled for: defaults for those left out, none that only repeats its default."""
    plain = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    wanted = [*[p.name for p in plain if p.name not in named][:positional], *named]
    filled = dict(bound)
    for parameter in plain:
        name, default = parameter.name, parameter.default
        if default is parameter.empty:
            continue
        if name in wanted:
            filled.setdefault(name, default)
        elif name in bound and _is_same(bound[name], default):
            del filled[name]
        elif name in bound:
            value = bound[name]
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
    method = getattr(spec, "children", None)  # torch 2.11 may have only the field `children_specs`
    return list(method()) if callable(method) else list(spec.children_specs)
