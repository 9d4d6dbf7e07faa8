"""Stages that engines run: an inference pipeline of compiled parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from intarsia.errors import PartitionError
from intarsia.pipeline.stages.sequence import StageSequence
from intarsia.pipeline.stages.signature import CallSignature, TensorSpec, longer
from intarsia.pipeline.stages.stage import Stage, StageForm
from intarsia.pipeline.stages.tree_stage import TreeStage


class CompiledStage(nn.Module):
    """A stage that engines run. It returns a tuple."""

    def __init__(self, program: nn.Module, stage: nn.Module) -> None:
        super().__init__()
        self.program = program
        self.training = False
        object.__setattr__(self, "form", stage.form if isinstance(stage, Stage) else None)
        if isinstance(stage, TreeStage):
            self.input_names, self.output_names = stage.input_names, stage.output_names
            self.answer = stage.answer

    form: StageForm | None  # of a stage cut by the graph
    # Of a stage cut along modules: see TreeStage.
    input_names: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()
    answer: tuple[Any, ...] | None = None

    def forward(self, *values: Any) -> tuple[Any, ...]:
        """The values of the border after the stage."""
        outputs = self.program(*values)
        return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)


def compile_stages(
    stages: StageSequence, args: Sequence[Any], kwargs: Mapping[str, Any] | None, options: Mapping[str, Any]
) -> list[nn.Module]:
    """The stages, each compiled with the values that reach it from an example call."""
    from intarsia.compiler.entry import compile_with
    from intarsia.options import CompileOptions

    checked = CompileOptions.checked(options, "compile")
    stages.check_memory()
    values: Sequence[Any] = stages.signature.flatten(args, kwargs)
    stages.signature.lengths(values)
    more = _one_sample_more(stages, values)
    parts: list[nn.Module] = []
    for i, stage in enumerate(stages):
        if not all(isinstance(v, torch.Tensor) for v in values):
            raise PartitionError(f"stage {i} takes a number from an earlier stage; engines take tensors only")
        with torch.no_grad():
            following = stage(*values)
        form = stage.form if isinstance(stage, Stage) else None
        shapes = _grown_sizes(values, more[i]) if form is None else _open_sizes(form, stages.signature)
        program = compile_with(checked, stage, tuple(values), dynamic_shapes=shapes)
        parts.append(CompiledStage(program, stage))
        values = following
    return parts


def _one_sample_more(stages: StageSequence, values: Sequence[Any]) -> list[Sequence[Any]]:
    """The inputs of each stage for a batch with one more sample; empty if all stages are cut by the graph."""
    if all(isinstance(stage, Stage) for stage in stages):
        return []
    signature = stages.signature
    grown: Sequence[Any] = [
        longer(v, axis) for v, axis in zip(values, map(signature.axis, signature.tensors), strict=True)
    ]
    inputs = []
    with torch.no_grad():
        for stage in stages:
            inputs.append(grown)
            grown = stage(*grown)
    return inputs


def _grown_sizes(values: Sequence[Any], more: Sequence[Any]) -> Any:
    """The sizes that change with one more sample, in the form of `torch.export`; None if none does."""
    shapes = [
        {i: Dim.AUTO for i in range(a.ndim) if a.shape[i] != b.shape[i]}
        for a, b in zip(values, more, strict=True)
    ]
    return (tuple(shapes),) if any(shapes) else None


def _open_sizes(form: StageForm, signature: CallSignature) -> Any:
    """The dynamic sizes of the captured graph, in the form of `torch.export`; None if all are fixed."""
    dims: dict[str, Any] = {}
    for name, (low, high) in signature.ranges.items():
        if name.isidentifier():
            dims[name] = Dim(name, min=low, max=high) if high < 2**31 else Dim(name, min=low)
    shapes = [
        {i: dims.get(str(dim), Dim.AUTO) for i, dim in enumerate(spec.shape) if isinstance(dim, str)}
        for spec in form.takes
        if isinstance(spec, TensorSpec)
    ]
    return (tuple(shapes),) if any(shapes) else None
