"""A model cut into stages, and the ways to run it: in one process, over several processes, on the engines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn

from intarsia.errors import PartitionError
from intarsia.pipeline.stages.compiled import compile_stages
from intarsia.pipeline.stages.pipelined import Pipelined
from intarsia.pipeline.stages.sequence import StageSequence
from intarsia.pipeline.stages.weights import Weights, load_stages

if TYPE_CHECKING:
    from intarsia.pipeline.distributed.options import DistributedKeywords
    from intarsia.pipeline.distributed.pipeline import DistributedPipeline


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
