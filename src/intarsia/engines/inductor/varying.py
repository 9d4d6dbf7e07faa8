"""Inputs whose sizes vary, as Inductor takes them: tensors without contents whose sizes are symbols.

The symbols are Inductor's own, so that nothing it finds out about them changes the graph's.

A condition that Inductor adds means code for some sizes only, so such a piece is refused. So are sizes that
may be 0 or 1, which Inductor takes for constants without asking.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    StrictMinMaxConstraint,
)
from torch.utils._sympy.value_ranges import ValueRanges

from intarsia.errors import EngineError
from intarsia.graph.nodes import uses_gpu

# Inputs as a graph describes them: sizes and strides without contents.


LEAST = 2  # of a size that is a symbol of Inductor's: 0 and 1 are numbers there


def has_fixed_sizes(described: torch.Tensor) -> bool:
    """Whether a tensor's sizes and strides are numbers."""
    return all(isinstance(size, int) for size in (*described.shape, *described.stride()))


def unfit_size(node: fx.Node) -> str | None:
    """Why Inductor's code cannot be for every size of what a node makes, in a clause; None if it may be.

    A size that is computed from others, such as one less than another, is known by those. On a GPU sizes
    below 2 may be: there the graph itself, in a CUDA graph, answers such calls.
    """
    described = node.meta.get("val")
    values = described if isinstance(described, list | tuple) else [described]
    sizes = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
    for size in (*sizes, *values):
        if not isinstance(size, torch.SymInt):
            continue
        if not size.node.has_hint():
            return f"size {size} depends on values"
        if size.node.expr.is_Symbol and (reason := too_small(size)) is not None:
            return None if uses_gpu(node.graph) else reason
    return None


def too_small(size: torch.SymInt) -> str | None:
    """Why a size of an input cannot be a symbol of Inductor's, which are never 0 or 1."""
    least, _ = bounds(size)
    if least >= LEAST:
        return None
    return f"size {size} may be {least}, and sizes below {LEAST} need separate code"


def bounds(size: torch.SymInt) -> tuple[Any, Any]:
    """The least and the largest that a size may be; the latter may be without bound."""
    match = size.node.shape_env.bound_sympy(size.node.expr)
    return match.lower, match.upper


def empty_like(described: torch.Tensor) -> torch.Tensor:
    """A tensor of these sizes and strides, which are numbers."""
    sizes, strides = described.shape, described.stride()
    return torch.empty_strided(sizes, strides, dtype=described.dtype, device=described.device)


class VaryingInputs:
    """Inputs like those a graph describes, with symbols for sizes that vary."""

    def __init__(self, described: Sequence[torch.Tensor]) -> None:
        self._env = ShapeEnv()
        self._mode = FakeTensorMode(shape_env=self._env)
        self.tensors: list[Any] = [self._tensor(value) for value in described]
        known: dict[str, torch.SymInt] = {}
        for value, tensor in zip(described, self.tensors, strict=True):
            for old, new in zip(value.shape, tensor.shape, strict=True):
                if isinstance(old, torch.SymInt):
                    torch._check(known.setdefault(str(old), new) == new)
        self._told = len(self._env.guards)

    def tracing(self) -> AbstractContextManager[object]:
        """A context in which Inductor accepts these tensors."""
        return tracing(TracingContext(self._mode))

    def check(self) -> None:
        """Raises EngineError if the compiled code is correct for some of the sizes only."""
        results = [str(guard.expr) for guard in self._env.guards[self._told :]]
        if results:
            raise EngineError(f"its code would hold only where {' and '.join(results)}")

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        sizes, strides = ([_hint(size) for size in sizes] for sizes in (value.shape, value.stride()))
        real = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
        if has_fixed_sizes(value):
            return self._mode.from_tensor(real, static_shapes=True)
        if not real.is_contiguous():
            raise EngineError(f"an input of sizes {tuple(map(str, value.shape))} is not contiguous")
        fixed, varies = DimDynamic.STATIC, DimDynamic.DYNAMIC
        context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(
            dynamic_sizes=[varies if isinstance(size, torch.SymInt) else fixed for size in value.shape],
            constraint_sizes=[
                _range(size) if isinstance(size, torch.SymInt) else None for size in value.shape
            ],
        )
        return self._mode.from_tensor(real, symbolic_context=context)


def _hint(size: int | torch.SymInt) -> int:
    return max(int(size.node.hint), LEAST) if isinstance(size, torch.SymInt) else size


def _range(size: torch.SymInt) -> StrictMinMaxConstraint:
    least, most = bounds(size)
    return StrictMinMaxConstraint(vr=ValueRanges(max(least, LEAST), most), warn_only=False)
