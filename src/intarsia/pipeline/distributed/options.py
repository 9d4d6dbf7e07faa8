"""The options of a pipeline over several processes, by name."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import torch

from intarsia.errors import check_option_names
from intarsia.pipeline.distributed.loss import Loss, LossWeight, MicrobatchLoss, Reduction
from intarsia.pipeline.distributed.placement import Plan
from intarsia.pipeline.stages.weights import Weights

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh


class DistributedKeywords(TypedDict, total=False):
    """The fields of `DistributedOptions`, as `Stages.distributed` takes them by name."""

    loss_fn: Loss | None
    loss_weight: LossWeight | None
    reduction: Reduction | None
    check_loss: bool
    deferred_batch_norm: bool
    checkpoint: bool | Collection[int | str]
    scaler: torch.amp.GradScaler | None
    target_axis: int
    device: torch.device | str | None
    group: dist.ProcessGroup | None
    mesh: DeviceMesh | None
    tensor_plan: Plan | None
    seed: int | None
    weights: str | Path | Weights | None


@dataclass(frozen=True)
class DistributedOptions:
    """The options of `Stages.distributed`, which takes them by name.

    Args:
        loss_fn: called with the model's answer and the target of a micro-batch.
        loss_weight: a function from the target of a micro-batch to the number of elements (such as tokens)
            that its loss averages over, or "equal". See `MicrobatchLoss` for losses that do not need it.
        reduction: whether the loss of a batch is the mean or the sum over its micro-batches; by default, as
            `loss_fn` states (`nn.CrossEntropyLoss(reduction="sum")`), or else the mean.
        check_loss: whether the loss of the micro-batches is compared with that of the whole batch.
        deferred_batch_norm: whether the running statistics of batch norms are those of the whole batch. By
            default, every micro-batch changes them. Each micro-batch is normalized by its own statistics.
        checkpoint: what is computed again in the backward pass: True for all stages, numbers of stages, or
            names or patterns of modules (`"h.*.mlp"`).
        scaler: a `torch.amp.GradScaler` on each rank; None on a rank whose stages are all frozen. If the
            gradients of a rank overflow, all scalers skip the step.
        target_axis: the batch dimension of the target.
        device: the device of this rank's stages.
        group: the process group of the pipeline's ranks.
        mesh: a `DeviceMesh` of ("data", "pipeline"), instead of a group. Each row is a replica with its own
            batch (`shard`). Gradients and loss are those of all batches together. A dimension "shard" shards
            stages by `fully_shard`. Ranks along a dimension "tensor" step over the same batch.
        tensor_plan: for a dimension "tensor", a plan of `torch.distributed.tensor.parallel`, by names of
            modules of the model. The stages must be cut along modules (`split(..., way="modules")`).
        seed: the seed of all random numbers, together with the numbers of step and micro-batch. By default,
            `torch.initial_seed()` of the first rank. Checkpoints contain `seed` and `steps`.
        weights: a safetensors file, a folder of shards, or a checkpoint of `save`. This rank reads only its
            own stages. `Weights(path, ...)` has options. Stages on the meta device need it.

    >>> DistributedOptions.of(loss_fnn=None)
    Traceback (most recent call last):
    ...
    intarsia.errors.OptionError: distributed has no option 'loss_fnn'; did you mean 'loss_fn'?
    """

    loss_fn: Loss | None = None
    loss_weight: LossWeight | None = None
    reduction: Reduction | None = None
    check_loss: bool = True
    deferred_batch_norm: bool = False
    checkpoint: bool | Collection[int | str] = False
    scaler: torch.amp.GradScaler | None = None
    target_axis: int = 0
    device: torch.device | str | None = None
    group: dist.ProcessGroup | None = None
    mesh: DeviceMesh | None = None
    tensor_plan: Plan | None = None
    seed: int | None = None
    weights: str | Path | Weights | None = None

    @staticmethod
    def of(**options: Unpack[DistributedKeywords]) -> DistributedOptions:
        """The options with these names. Raises OptionError for an unknown name."""
        check_option_names(options, DistributedKeywords.__annotations__, "distributed")
        return DistributedOptions(**options)

    @property
    def loss(self) -> MicrobatchLoss | None:
        """The loss of a step; None for a pipeline that only runs inference."""
        if self.loss_fn is None:
            return None
        return MicrobatchLoss(self.loss_fn, self.loss_weight, self.reduction, self.check_loss)
