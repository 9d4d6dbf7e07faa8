"""Cut stages in one process, each with a worker of its own, micro-batches flowing through them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from intarsia.errors import InputError, PartitionError
from intarsia.pipeline.gpipe.gpipe import GPipe
from intarsia.pipeline.stages.sequence import StageSequence
from intarsia.pipeline.stages.signature import TensorSpec
from intarsia.pipeline.stages.stage import Stage


class Pipelined(StageSequence):
    """Stages run by `GPipe`: called as the model is, on whole batches, with the same answer.

    Every output must have the batch in front, since it is joined from micro-batches. A loss is computed from
    the joined outputs, outside.
    """

    def __init__(self, stages: StageSequence, chunks: int, options: Mapping[str, Any]) -> None:
        super().__init__(list(stages), stages.signature, stages.report, stages.keys)
        _check(stages, chunks, options)
        rest = dict(options)
        devices = [torch.device(d) for d in rest.pop("devices", ["cpu"] * len(stages))]
        if len(devices) != len(stages):
            raise PartitionError(f"{len(stages)} stages need as many devices, not {len(devices)}")
        for stage, device in zip(stages, devices, strict=True):
            if isinstance(stage, Stage):
                stage.to_device(device)
        steps = [_Spread(s, self._whole() if i == 0 else ()) for i, s in enumerate(stages)]
        line = nn.Sequential(*steps).train(stages.training)
        engine = GPipe(line, [1] * len(steps), devices=devices, chunks=chunks, **rest)
        # Not registered: it holds the same stages, and the names belong to the plain model.
        object.__setattr__(self, "engine", engine)
        self.chunks = chunks

    engine: GPipe

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's answer, computed micro-batch by micro-batch."""
        tensors = self.signature.flatten(args, kwargs)
        self._check_lengths(tensors)
        split = [t for s, t in zip(self.signature.tensors, tensors, strict=True) if self.signature.splits(s)]
        given = []
        for spec, tensor in zip(self.signature.tensors, tensors, strict=True):
            if self.signature.splits(spec) or tensor.ndim == 0:
                given.append(tensor)
            else:
                given.append(tensor.unsqueeze(0).expand(len(split[0]), *tensor.shape))
        return self.signature.unflatten(self.engine(tuple(given)))

    def train(self, mode: bool = True) -> Pipelined:
        """Set the mode of the stages and of the engine."""
        super().train(mode)
        if "engine" in self.__dict__:
            self.engine.train(mode)
        return self

    def _whole(self) -> tuple[bool, ...]:
        """Which inputs every micro-batch gets in full, with a dimension in front that is taken off."""
        return tuple(not self.signature.splits(s) and s.shape != () for s in self.signature.tensors)

    def _parts(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        split = [self.signature.splits(s) for s in self.signature.tensors]
        columns = [t.chunk(self.chunks) if cut else (t,) for t, cut in zip(tensors, split, strict=True)]
        count = max(map(len, columns))
        return [[c[min(i, len(c) - 1)] for c in columns] for i in range(count)]

    def _check_lengths(self, tensors: Sequence[torch.Tensor]) -> None:
        parts = self._parts(tensors)
        for i, part in enumerate(parts):
            try:
                self.signature.lengths(part)
            except InputError as error:
                raise InputError(f"micro-batch {i} of {len(parts)}: {error}") from error


class _Spread(nn.Module):
    """A stage as a layer: one tuple in, one tuple out."""

    def __init__(self, stage: nn.Module, whole: Sequence[bool]) -> None:
        super().__init__()
        self.stage = stage
        self.whole = tuple(whole)
        self.training = stage.training

    def forward(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The stage's answer to the values of one micro-batch."""
        if any(self.whole):
            values = tuple(v[0] if w else v for v, w in zip(values, self.whole, strict=True))
        return self.stage(*values)  # type: ignore[no-any-return]


def _check(stages: StageSequence, chunks: int, options: Mapping[str, Any]) -> None:
    if chunks < 1:
        raise PartitionError(f"chunks={chunks} must be 1 or more")
    if options.get("deferred_batch_norm"):
        raise PartitionError(
            "deferred_batch_norm=True needs nn.BatchNorm modules; the graph holds their operations instead"
        )
    for spec in stages.signature.outputs if chunks > 1 else ():
        if isinstance(spec, TensorSpec) and not stages.signature.splits(spec):
            raise PartitionError(
                f"output {spec} has no batch in front and cannot be joined from micro-batches;"
                " return what it is computed from instead"
            )
