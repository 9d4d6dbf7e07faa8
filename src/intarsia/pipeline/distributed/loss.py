"""The loss of a batch from the losses of its micro-batches, each weighed by what it averaged over.

Which losses average over unequal numbers cannot be known of a function. So the loss of the whole batch is
computed once more, without gradients, and compared. Replicas weigh and add up; an average of replicas would
be wrong where they hold different numbers of tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from intarsia.errors import PartitionError, PipelineError
from intarsia.pipeline.distributed.world import World

Loss = Callable[..., Tensor]
LossWeight = Callable[[Any], Tensor | float] | Literal["equal"]
Reduction = Literal["mean", "sum"]

NO_TARGET = object()
NOT_SCALED = -1.0  # where a scale would be, of a rank that learns without a scaler

# Losses that average over the samples, or tokens, whose target is not `ignore_index`.
_TOKEN_MEANS = {F.cross_entropy, F.nll_loss}
# Losses that average over all elements of their target.
_ELEMENT_MEANS = {
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
}


class MicrobatchLoss:
    """The user's loss, scaled so that the gradients of all micro-batches add up to the whole batch's.

    A mean over the batch is the mean over micro-batches only where each averaged over as much. `weight` says
    over how much, from the target of a micro-batch; `"equal"` says that they are alike. Without it cross
    entropy and negative log likelihood are recognised (targets of `ignore_index` do not count), and any other
    loss is taken as equal and compared, after the step, with the loss of the whole batch.
    """

    def __init__(self, loss_fn: Loss, weight: LossWeight | None, reduction: Reduction, check: bool) -> None:
        if reduction not in ("mean", "sum"):
            raise PartitionError(f"reduction={reduction!r} is neither 'mean' nor 'sum'")
        if weight is not None and weight != "equal" and not callable(weight):
            raise PartitionError(f"loss_weight={weight!r} is neither a function of the target nor 'equal'")
        if weight is not None and reduction == "sum":
            raise PartitionError("loss_weight has no effect with reduction='sum'")
        self.loss_fn: Loss = loss_fn
        self.weight = weight
        self.reduction = reduction
        self.check: bool = check
        self._targets: list[Any] = []
        self._shares: list[float] = []
        self._scale = 1.0

    def weigh(self, targets: Sequence[Any], samples: Sequence[int]) -> list[float]:
        """How much each micro-batch counts; by its samples, if nothing else is known."""
        return [self._weigh(t, n) if n else 0.0 for t, n in zip(targets, samples, strict=True)]

    def knows(self, target: Any) -> bool:
        """Whether it is said, or known, over how much a loss averages."""
        return (
            self.reduction == "sum"
            or self.weight is not None
            or token_count(self.loss_fn, target) is not None
        )

    def begin(
        self, targets: Sequence[Any], weights: Sequence[float], total: float, scale: float = 1.0
    ) -> None:
        """Start a batch of these micro-batches; `total` is the weight of all replicas.

        `scale` is a gradient scaler's: the losses that go into the backward pass are multiplied by it.
        """
        self._targets = list(targets)
        self._scale = scale
        if self.reduction == "sum":
            self._shares = [float(w > 0) for w in weights]
            return
        # Nothing to average over: the plain loss is 0/0 too, and says so.
        self._shares = [w / total if total else 1 / len(targets) for w in weights]

    def end(self) -> None:
        """Forget the targets."""
        self._targets, self._shares = [], []

    def __call__(self, output: Any, index: int) -> Tensor:
        """The share of one micro-batch in the loss of the batch."""
        share = self._shares[index]
        if share == 0.0:
            return _zero(output)  # a mean over nothing is NaN, and counts for nothing
        return call_loss(self.loss_fn, output, self._targets[index]) * (share * self._scale)

    def compare(self, output: Any, target: Any, loss: Tensor) -> None:
        """Refuse a loss of micro-batches that is not the loss of the batch."""
        if not self.check:
            return
        part = 1.0 if self.reduction == "sum" else sum(self._shares)  # of this replica
        if part == 0.0:
            return
        with torch.no_grad():
            whole = call_loss(self.loss_fn, output, target)
        if not isinstance(whole, Tensor) or whole.ndim:
            return
        loss = loss / part
        tolerance = 2e-5 if whole.dtype in (torch.float32, torch.float64) else 2e-2
        if not torch.allclose(
            whole.to(loss.dtype), loss, rtol=tolerance, atol=tolerance / 10, equal_nan=True
        ):
            raise PipelineError(
                f"the loss of the whole batch is {whole.item():.6g}, but its micro-batches give"
                f" {loss.item():.6g}: they do not average over equally much. Give loss_weight=, a function of"
                " a micro-batch's target (say lambda target: (target != -100).sum()), or reduction='sum' for"
                " a sum; check_loss=False for a loss that is random"
            )

    def _weigh(self, target: Any, samples: int) -> float:
        if callable(self.weight) and self.reduction != "sum":
            return float(self.weight(None if target is NO_TARGET else target))
        known = self.weight != "equal" and self.reduction != "sum"
        counted = token_count(self.loss_fn, target) if known else None
        return float(samples) if counted is None else counted


def call_loss(loss_fn: Loss, output: Any, target: Any) -> Tensor:
    """The loss with a target, or without where there is none."""
    return loss_fn(output) if target is NO_TARGET else loss_fn(output, target)


def token_count(loss_fn: Loss, target: Any) -> float | None:
    """How much a known loss averages over, from its target; None for a loss that is not known.

    >>> token_count(nn.CrossEntropyLoss(), torch.tensor([1, -100, 2]))
    2.0
    """
    options: dict[str, Any] = {}
    known: Any = loss_fn
    if isinstance(known, functools.partial) and not known.args:
        known, options = known.func, dict(known.keywords)
    if isinstance(known, nn.CrossEntropyLoss | nn.NLLLoss):
        options = {n: getattr(known, n) for n in ("weight", "ignore_index", "reduction")}
    elif known in _ELEMENT_MEANS or type(known) in _ELEMENT_MEANS:
        options = {"reduction": getattr(known, "reduction", "mean")} | options
        return (
            float(target.numel()) if options["reduction"] == "mean" and isinstance(target, Tensor) else None
        )
    elif known not in _TOKEN_MEANS:
        return None
    if (
        options.get("reduction", "mean") != "mean"
        or not isinstance(target, Tensor)
        or target.is_floating_point()
    ):
        return None
    counted = target != options.get("ignore_index", -100)
    if (weight := options.get("weight")) is not None:
        return float(weight[target[counted]].sum())
    return float(counted.sum())


def _zero(output: Any) -> Tensor:
    """Zero, with a gradient of zero for every output, whatever it holds."""
    tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
    return torch.stack(
        [t.masked_fill(torch.ones_like(t, dtype=torch.bool), 0).sum().float() for t in tensors]
    ).sum()


def own_scale(
    scaler: torch.amp.GradScaler | None, parameters: Sequence[nn.Parameter], device: torch.device
) -> float | None:
    """What this rank's scaler multiplies the loss by; None where there is none, and nothing learns."""
    learns = any(p.requires_grad for p in parameters)
    if scaler is None or not scaler.is_enabled():
        return NOT_SCALED if learns else None
    if not learns:
        raise PartitionError(
            "this rank has no trainable parameter, so its"
            " GradScaler would refuse to step: give scaler=None on this rank"
        )
    # Asked as a loop would, which also wakes the scaler.
    return float(scaler.scale(torch.ones((), device=device)))


def share_overflow(parameters: Sequence[nn.Parameter], world: World, device: torch.device) -> None:
    """Let every rank's scaler find an overflow that one of them would find, so that all skip the step."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    over = any(not bool(torch.isfinite(g).all()) for g in gradients)
    flags = world.gather(torch.tensor([int(over)], device=device))
    first = next((g for g in gradients if g.numel()), None)
    if first is not None and any(int(flag) for flag in flags.values()):
        first[(0,) * first.ndim] = float("inf")
