"""A model cut into stages, and the ways to run it: in one process, over several processes, on the engines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn
from torch.export import Dim

from intarsia.errors import InputError, PartitionError
from intarsia.pipeline.gpipe.gpipe import GPipe
from intarsia.pipeline.stages.sequence import StageSequence
from intarsia.pipeline.stages.signature import CallSignature, TensorSpec, from_front, longer
from intarsia.pipeline.stages.stage import Deferred, Stage, StageForm, defer_statistics
from intarsia.pipeline.stages.tied import Borrowed, place_stages
from intarsia.pipeline.stages.tree_stage import CompiledStage
from intarsia.pipeline.stages.weights import Weights, load_stages

if TYPE_CHECKING:
    from intarsia.pipeline.distributed.options import DistributedKeywords
    from intarsia.pipeline.distributed.pipeline import DistributedPipeline


class Pipelined(StageSequence):
    """Stages that `GPipe` runs. Call it like the model, with whole batches; it returns the same outputs.

    Every output must have a batch dimension, since outputs are joined from micro-batches. Compute a loss from
    the joined outputs.
    """

    def __init__(self, stages: StageSequence, chunks: int, options: Mapping[str, Any]) -> None:
        super().__init__(list(stages), stages.signature, stages.report, stages.keys)
        stages.check_memory()
        _check(stages, chunks, options)
        rest = dict(options)
        self.deferred: list[Deferred] = defer_statistics(stages, rest.pop("deferred_batch_norm", False))
        devices = [torch.device(d) for d in rest.pop("devices", ["cpu"] * len(stages))]
        if len(devices) != len(stages):
            raise PartitionError(f"{len(stages)} stages need as many devices, not {len(devices)}")
        self.borrowed: list[Borrowed] = place_stages(list(stages), stages.tied, devices)
        self.tied = stages.tied
        steps = [_Spread(stage) for stage in stages]
        signature = stages.signature
        steps[0].entering = tuple(
            0 if spec.shape == () else signature.axis(spec) for spec in signature.tensors
        )
        steps[-1].leaving = tuple(signature.axis(spec) or 0 for spec in signature.results)
        line = nn.Sequential(*steps).train(stages.training)
        engine = GPipe(line, [1] * len(steps), devices=devices, chunks=chunks, **rest)
        # Not registered: it has the same stages, and `state_dict` has the plain model's names.
        object.__setattr__(self, "engine", engine)
        self.chunks = chunks

    engine: GPipe

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs, computed in micro-batches."""
        tensors: Sequence[torch.Tensor] = self.signature.flatten(args, kwargs)
        axes, samples = self.signature.tensor_axes, self.signature.samples(tensors)
        size, least = samples, self.signature.least
        if 0 < samples < least and not self.why_not_padded:
            size = least
            tensors = [longer(t, axis, least - samples) for t, axis in zip(tensors, axes, strict=True)]
        sizes = chunk_sizes(size, self.chunks, least)
        self._check_lengths(tensors, sizes)
        parts = [
            t if t.ndim == 0 else t.movedim(a, 0) if a is not None else t.unsqueeze(0).expand(size, *t.shape)
            for t, a in zip(tensors, axes, strict=True)
        ]
        for weight in self.borrowed:
            weight.refresh()
        for norm in self.deferred:
            norm.begin(max(1, len(sizes)))
        results = self.engine(tuple(parts), sizes or None)
        if size > samples:
            results = tuple(m.narrow(0, 0, samples) for m in results)
        axes = [self.signature.axis(spec) or 0 for spec in self.signature.results]
        return self.signature.unflatten([m.movedim(0, a) for m, a in zip(results, axes, strict=True)])

    def train(self, mode: bool = True) -> Pipelined:
        """Set the mode of the stages and of the engine."""
        super().train(mode)
        if "engine" in self.__dict__:
            self.engine.train(mode)
        return self

    def _check_lengths(self, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> None:
        axes = self.signature.tensor_axes
        columns = [
            torch.split(t, list(sizes), axis) if axis is not None and sizes else (t,) * max(1, len(sizes))
            for t, axis in zip(tensors, axes, strict=True)
        ]
        for i, part in enumerate(zip(*columns, strict=True)):
            try:
                self.signature.lengths(part)
            except InputError as error:
                raise InputError(f"micro-batch {i} of {max(1, len(sizes))}: {error}") from error


def chunk_sizes(samples: int, chunks: int, least: int) -> list[int]:
    """The samples of each micro-batch, as in `torch.chunk`, or in even parts if its last part is too short.

    >>> chunk_sizes(5, 2, 2), chunk_sizes(5, 4, 2), chunk_sizes(7, 3, 2), chunk_sizes(5, 4, 0)
    ([3, 2], [3, 2], [3, 2, 2], [2, 2, 1])
    """
    if not samples:
        return []
    size = -(-samples // chunks)
    sizes = [min(size, samples - start) for start in range(0, samples, size)]
    if sizes[-1] >= least or len(sizes) == 1:
        return sizes
    count = max(1, min(chunks, samples // least))
    return [samples // count + (i < samples % count) for i in range(count)]


class _Spread(nn.Module):
    """A stage as a layer: it takes and returns one tuple of tensors with the batch in front.

    `entering` is the batch axis of each of the stage's inputs; None for a tensor that is not divided, which
    arrives with an extra dimension in front. `leaving` is the batch axis of each of the stage's outputs.
    """

    keys_draws = True  # the stage's nodes or modules draw by keys of their own

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage
        self.entering: tuple[int | None, ...] = ()
        self.leaving: tuple[int, ...] = ()
        self.training = stage.training

    def forward(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The stage's outputs for one micro-batch."""
        if self.entering:
            values = from_front(values, self.entering)
        outputs: tuple[Any, ...] = self.stage(*values)
        if any(self.leaving):
            outputs = tuple(v.movedim(a, 0) for v, a in zip(outputs, self.leaving, strict=True))
        return outputs


def _check(stages: StageSequence, chunks: int, options: Mapping[str, Any]) -> None:
    if chunks < 1:
        raise PartitionError(f"chunks={chunks} must be 1 or more")
    if chunks == 1:
        return
    stages.signature.check_divisible()
    for spec in stages.signature.results:
        if not stages.signature.splits(spec):
            raise PartitionError(
                f"output {spec} has no batch dimension in front, so micro-batches cannot be"
                " joined; return the tensors from which it is computed"
            )


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
    grown: Sequence[Any] = [longer(v, axis) for v, axis in zip(values, signature.tensor_axes, strict=True)]
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


class Stages(StageSequence):
    """The stages of one model, as `split` returns them. Call them like the model."""

    def gpipe(self, chunks: int = 1, **options: Any) -> nn.Module:
        """Run the stages in one process, with a worker for each stage and `chunks` micro-batches.

        The result is a module; call it like the model. `options` are those of `GPipe` (`devices`,
        `checkpoint`, ...).
        """
        return Pipelined(self, chunks, options)

    def distributed(
        self, schedule: str = "1F1B", n_microbatches: int = 8, **options: Unpack[DistributedKeywords]
    ) -> DistributedPipeline:
        """Run this process's stages with `torch.distributed.pipelining`, under `torchrun`.

        `schedule` is one of torch's (GPipe, 1F1B, Interleaved1F1B, ZeroBubble, ...) or of `define_schedule`.
        `options` are those of `DistributedOptions`: `loss_fn`, `loss_weight`, `reduction`, `check_loss`,
        `deferred_batch_norm`, `checkpoint`, `scaler`, `target_axis`, `device`, `group`, `mesh`,
        `tensor_plan`, `seed`, `weights`.
        """
        # Some builds of torch have no torch.distributed; cutting a model works without it.
        from intarsia.pipeline.distributed.pipeline import DistributedPipeline

        return DistributedPipeline(self, schedule, n_microbatches, **options)

    def load(
        self,
        path: str | Path,
        *,
        only: Collection[int] | None = None,
        device: torch.device | str | None = None,
        buffers: Mapping[str, torch.Tensor] | None = None,
        rename: Callable[[str], str] | None = None,
        strict: bool = True,
    ) -> Stages:
        """Fill the stages from a safetensors file, or a folder of shards; returns the stages.

        The names and shapes of the whole model are compared with the files' headers first. Stages that were
        cut on the meta device get memory on `device`; with `only` (numbers of stages) the others stay there.
        See `Weights` for `buffers`, `rename` and `strict`. Over several processes, use
        `distributed(..., weights=path)` instead: each rank then loads only its own stages.
        """
        load_stages(self, Weights(path, buffers or {}, rename, strict), only, device)
        return self

    def compile(  # type: ignore[override]
        self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> Stages:
        """Compile each stage with `intarsia.compile`, for inference.

        `args` and `kwargs` are an example call. It runs through the stages to find the example of each stage.
        `options` are those of `intarsia.compile` (`engines`, ...).
        """
        if self.training:
            raise PartitionError("the stages were cut in training mode; split the model after model.eval()")
        stages = Stages(compile_stages(self, args, kwargs, options), self.signature, self.report, ())
        stages.tied = ()  # compiled weights are frozen, so tied weights stay equal
        return stages
