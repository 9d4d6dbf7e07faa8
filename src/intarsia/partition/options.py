"""The options of the partitioner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypedDict

from torch import fx

from intarsia.errors import PartitionError

OpName: TypeAlias = Any
"""An OpOverload, an OpOverloadPacket, a torch function, or a string such as "relu", "aten::add" or
"torch.ops.aten.add.Tensor"; also the operator that a node lowers to or comes from ("aten::convolution"), and
a glob over such names ("aten::*")."""

ModuleName: TypeAlias = "type | str"
"""A module class, a qualified path ("encoder.layers.0"), or a glob over such paths ("*.attention")."""

Atomic: TypeAlias = "Sequence[OpName] | Callable[[fx.GraphModule], Iterable[Sequence[fx.Node]]]"
"""A chain of ops, or a function that finds groups of nodes."""


@dataclass(frozen=True)
class PartitionOptions:
    """The options of the partitioner.

    Args:
        min_block_size: the smallest number of operators in a segment of an engine. By default, the work of a
            segment is estimated instead.
        torch_executed_ops: operators that stay in PyTorch.
        torch_executed_modules: modules whose operators stay in PyTorch.
        require_full_compilation: raise an error if a node would run in PyTorch.
        atomic: chains of operators, or groups that a function finds, that are never cut apart.
        memory_budget: the largest number of bytes of weights in one segment, for each engine.
        backend_priority: engines, the preferred one first.
        backend_support_map: for each engine, the operators that it may take; `"all"` for all of them.

    Example:
        >>> PartitionOptions(min_block_size=3, torch_executed_ops=("aten::add",)).min_block_size
        3
    """

    min_block_size: int | None = None
    torch_executed_ops: Sequence[OpName] = ()
    torch_executed_modules: Sequence[ModuleName] = ()
    require_full_compilation: bool = False
    atomic: Sequence[Atomic] = ()
    memory_budget: Mapping[str, int] = field(default_factory=dict)
    backend_priority: Sequence[str] | None = None
    backend_support_map: Mapping[str, Sequence[OpName]] | None = None

    def __post_init__(self) -> None:
        least = self.min_block_size
        if least is not None and (type(least) is not int or least < 1):
            raise PartitionError(f"min_block_size={least!r} must be a whole number of at least 1")
        if not isinstance(self.require_full_compilation, bool):
            raise PartitionError(
                f"require_full_compilation={self.require_full_compilation!r}; give True or False"
            )
        for name in ("torch_executed_ops", "torch_executed_modules", "atomic", "backend_priority"):
            value = getattr(self, name)
            if value is not None or name != "backend_priority":
                object.__setattr__(self, name, _names(name, value))
        chains = [chain if callable(chain) else _names("atomic", chain) for chain in self.atomic]
        object.__setattr__(self, "atomic", tuple(chains))
        for name in ("memory_budget", "backend_support_map"):
            value = getattr(self, name)
            if not isinstance(value, Mapping) and (value is not None or name == "memory_budget"):
                raise PartitionError(f"{name}={value!r} names no engine; give e.g. {{'openvino': ...}}")
            if "pytorch" in (value or ()):
                what = "which takes every operator; torch_executed_ops keeps operators there"
                raise PartitionError(f"{name} names 'pytorch', {what}")
        if self.backend_support_map is not None:
            lists = {
                engine: _ops_of_engine(engine, names) for engine, names in self.backend_support_map.items()
            }
            object.__setattr__(self, "backend_support_map", lists)
        for engine, budget in self.memory_budget.items():
            if type(budget) is not int or budget < 1:
                raise PartitionError(f"memory_budget of {engine} is {budget!r} bytes; it must be at least 1")

    def among(self, engines: Sequence[str]) -> PartitionOptions:
        """The same options with `backend_priority` restricted to these engines."""
        if self.backend_priority is None:
            return self
        return replace(self, backend_priority=[name for name in self.backend_priority if name in engines])


def _names(option: str, source: Any) -> tuple[Any, ...]:
    """The names as a tuple, since an iterator can be read only once."""
    if isinstance(source, str) or not isinstance(source, Iterable):
        example = [source] if isinstance(source, str) else ["aten::relu"]
        raise PartitionError(f"{option}={source!r} is not a list of names; give e.g. {example!r}")
    return tuple(source)


def _ops_of_engine(engine: str, names: Any) -> tuple[OpName, ...]:
    if names == "all" or (isinstance(names, list | tuple) and [*names] == ["all"]):
        return ("*",)
    return _names(f"backend_support_map of {engine}", names)


class PartitionChoices(TypedDict, total=False):
    """The fields of `PartitionOptions`, as `compile` and `explain` take them by name."""

    min_block_size: int | None
    torch_executed_ops: Sequence[OpName]
    torch_executed_modules: Sequence[ModuleName]
    require_full_compilation: bool
    atomic: Sequence[Atomic]
    memory_budget: Mapping[str, int]
    backend_priority: Sequence[str] | None
    backend_support_map: Mapping[str, Sequence[OpName]] | None


def partition_options(options: PartitionOptions | None, choices: PartitionChoices) -> PartitionOptions:
    """One `PartitionOptions` out of `options=` and the arguments given by name; both at once is an error.

    >>> partition_options(None, {"min_block_size": 3}).min_block_size
    3
    """
    if options is None:
        return PartitionOptions(**choices)
    if not isinstance(options, PartitionOptions):
        raise PartitionError(f"options={options!r}; give a PartitionOptions, or its fields by name")
    if choices:
        raise PartitionError(f"options and {', '.join(choices)} are both given; give one of them")
    return options
