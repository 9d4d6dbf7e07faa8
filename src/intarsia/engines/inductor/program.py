"""Calls of what Inductor compiled: its code presumes the strides that it was compiled for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from intarsia.engines.inductor.compiler import Compiled
from intarsia.engines.inductor.described import LEAST, has_fixed_sizes, too_small


class InductorProgram:
    """A compiled graph; an input laid out otherwise is copied into the layout that it was compiled for.

    That is contiguous where sizes vary. Of sizes below 2 its code knows nothing: calls of them run the graph
    itself, operator by operator.
    """

    def __init__(
        self, compiled: Compiled, described: Sequence[torch.Tensor], graph: fx.GraphModule | None = None
    ) -> None:
        self._compiled = compiled
        self._strides = [tensor.stride() if has_fixed_sizes(tensor) else None for tensor in described]
        varying = [
            (place, axis)
            for place, tensor in enumerate(described)
            for axis, size in enumerate(tensor.shape)
            if isinstance(size, torch.SymInt) and too_small(size) is not None
        ]
        self._small = (graph, varying) if graph is not None and varying else None

    def __call__(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        if self._small is not None:
            graph, varying = self._small
            if any(inputs[place].shape[axis] < LEAST for place, axis in varying):
                with torch.no_grad():
                    return tuple(graph(*inputs))
        laid_out = [
            tensor if tensor.stride() == strides else _restride(tensor, strides)
            for tensor, strides in zip(inputs, self._strides, strict=True)
        ]
        with torch.no_grad():
            return tuple(self._compiled(*laid_out))


def _restride(tensor: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
    if strides is None:
        return tensor.contiguous()
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)
