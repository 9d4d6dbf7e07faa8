"""Stages given to the engines: an inference pipeline of compiled parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from intarsia.errors import PartitionError
from intarsia.pipeline.stages.sequence import StageSequence
from intarsia.pipeline.stages.signature import CallSignature, TensorSpec
from intarsia.pipeline.stages.stage import Stage


class CompiledStage(nn.Module):
    """A stage run by engines; its values keep their order, and always come as a tuple."""

    def __init__(self, program: nn.Module) -> None:
        super().__init__()
        self.program = program
        self.training = False

    def forward(self, *values: Any) -> tuple[Any, ...]:
        """The next border's values."""
        answer = self.program(*values)
        return tuple(answer) if isinstance(answer, tuple | list) else (answer,)


def compile_stages(
    stages: StageSequence, args: Sequence[Any], kwargs: Mapping[str, Any] | None, options: Mapping[str, Any]
) -> list[nn.Module]:
    """Compile every stage with the values that reach it from an example call."""
    from intarsia.compiler import compile as compile_module

    stages.check_memory()
    values: Sequence[Any] = stages.signature.flatten(args, kwargs)
    stages.signature.lengths(values)
    parts: list[nn.Module] = []
    for i, stage in enumerate(stages):
        if not all(isinstance(v, torch.Tensor) for v in values):
            raise PartitionError(f"stage {i} takes a number from an earlier stage; engines take tensors only")
        with torch.no_grad():
            following = stage(*values)
        shapes = _open_sizes(stage, stages.signature)
        parts.append(CompiledStage(compile_module(stage, tuple(values), dynamic_shapes=shapes, **options)))
        values = following
    return parts


def _open_sizes(stage: nn.Module, signature: CallSignature) -> Any:
    """The sizes that the capture left open, as `torch.export` takes them; None where all are fixed."""
    takes = stage.form.takes if isinstance(stage, Stage) else ()
    dims: dict[str, Any] = {}
    for name, (low, high) in signature.ranges.items():
        if name.isidentifier():
            dims[name] = Dim(name, min=low, max=high) if high < 2**31 else Dim(name, min=low)
    shapes = [
        {i: dims.get(str(dim), Dim.AUTO) for i, dim in enumerate(spec.shape) if isinstance(dim, str)}
        for spec in takes
        if isinstance(spec, TensorSpec)
    ]
    return (tuple(shapes),) if any(shapes) else None
