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
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    StrictMinMaxConstraint,
)
from torch.utils._sympy.value_ranges import ValueRanges

from intarsia.engines.inductor.described import LEAST, bounds, has_fixed_sizes
from intarsia.errors import EngineError


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
