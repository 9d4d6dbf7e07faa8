"""What a user may ask of the partitioner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import fx

from intarsia.errors import PartitionError

OpName: TypeAlias = Any
"""An OpOverload, an OpOverloadPacket, or a string such as "aten::add" or "torch.ops.aten.add.Tensor"."""

ModuleName: TypeAlias = "type | str"
"""A module class, a qualified path ("encoder.layers.0"), or a glob over such paths ("*.attention")."""

Atomic: TypeAlias = "Sequence[OpName] | Callable[[fx.GraphModule], Iterable[Sequence[fx.Node]]]"
"""A chain of ops, or a function that finds groups of nodes."""


@dataclass(frozen=True)
class PartitionOptions:
    """What a user may ask of the partitioner.

    Args:
        min_block_size: the fewest ops an engine's segment must have; None weighs the work instead
            (see `partition.blocks`).
        torch_executed_ops: ops that stay in PyTorch.
        torch_executed_modules: modules whose ops stay in PyTorch.
        require_full_compilation: raise if any node is left to PyTorch.
        atomic: patterns that are never cut apart.
        memory_budget: bytes of weights that one segment of an engine may hold.
        backend_priority: engines in the order to prefer (hierarchical).
        backend_support_map: the ops each engine is given, by name (hierarchical).

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
        if self.min_block_size is not None and self.min_block_size < 1:
            raise PartitionError(f"min_block_size={self.min_block_size} must be at least 1")
        for engine, budget in self.memory_budget.items():
            if budget < 1:
                raise PartitionError(f"memory_budget of {engine} is {budget} bytes; it must be at least 1")
