"""The loss of a batch from the losses of its micro-batches, each weighted by the elements it averages over.

A function does not tell how many elements it averages over. So the loss of the whole batch is computed again,
without gradients, and compared. The weighted losses of replicas are added: their mean would be wrong if they
have different numbers of tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from intarsia.errors import PartitionError, PipelineError
from intarsia.pipeline.distributed.world import World
from intarsia.pipeline.stages.signature import value_name
from intarsia.pipeline.stages.stage import Stage
from intarsia.pipeline.stages.tied import gradient_elements

Loss = Callable[..., Tensor]
LossWeight = Callable[[Any], Tensor | float] | Literal["equal"]
Reduction = Literal["mean", "sum"]

NO_TARGET = object()
NOT_SCALED = -1.0  # the scale of a rank that trains without a scaler

# Losses that average over the samples, or tokens, whose target is not `ignore_index`.
_TOKEN_MEANS = {F.cross_entropy, F.nll_loss}
_TOKEN_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss)
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
    """The user's loss, scaled so that the gradients of all micro-batches sum to those of the whole batch.

    The mean over the batch is the mean of the micro-batches' means only if all of them average over equally
    many elements. `weight` returns the number of elements for the target of a micro-batch; `"equal"` means
    that all are equal. Without `weight`, torch's cross entropy and negative log likelihood are recognized
    (targets of `ignore_index` do not count). Any other loss is treated as equal, and compared with the loss
    of the whole batch after the step.
    """

    def __init__(
        self, loss_fn: Loss, weight: LossWeight | None, reduction: Reduction | None, check: bool
    ) -> None:
        if reduction is None:
            reduction = "sum" if _stated(loss_fn)[1].get("reduction") == "sum" else "mean"
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
        """The weight of each micro-batch; by default, its number of samples."""
        return [self._weigh(t, n) if n else 0.0 for t, n in zip(targets, samples, strict=True)]

    def knows(self, target: Any) -> bool:
        """Whether the number of elements that the loss averages over is known."""
        return (
            self.reduction == "sum"
            or self.weight is not None
            or token_count(self.loss_fn, target) is not None
        )

    def begin(
        self, targets: Sequence[Any], weights: Sequence[float], total: float, scale: float = 1.0
    ) -> None:
        """Start a batch of these micro-batches. `total` is the weight of all replicas.

        `scale` is the factor of a gradient scaler; the losses of the backward pass are multiplied by it.
        """
        self._targets = list(targets)
        self._scale = scale
        if self.reduction == "sum":
            self._shares = [float(w > 0) for w in weights]
            return
        # If there is nothing to average over, the plain loss is 0/0 too.
        self._shares = [w / total if total else 1 / len(targets) for w in weights]

    def end(self) -> None:
        """Drop the targets."""
        self._targets, self._shares = [], []

    def __call__(self, output: Any, index: int) -> Tensor:
        """The part of one micro-batch in the loss of the batch."""
        share = self._shares[index]
        if share == 0.0:
            return _zero(output)  # the mean over nothing would be NaN
        loss: Any = call_loss(self.loss_fn, output, self._targets[index])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            form = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{loss!r:.60}"
            raise PipelineError(f"loss_fn returned {form}; a loss is a tensor with one element")
        return loss * (share * self._scale)

    def compare(self, output: Any, target: Any, loss: Tensor) -> None:
        """Raise PipelineError if the loss of the micro-batches is not the loss of the whole batch."""
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
                f" {loss.item():.6g}: they average over different numbers of elements. Use loss_weight=, a"
                " function of a micro-batch's target (such as lambda target: (target != -100).sum()),"
                " reduction='sum' for a sum, or check_loss=False for a random loss"
            )

    def _weigh(self, target: Any, samples: int) -> float:
        if callable(self.weight) and self.reduction != "sum":
            return float(self.weight(None if target is NO_TARGET else target))
        varies = self.weight != "equal" and self.reduction != "sum"
        count = token_count(self.loss_fn, target) if varies else None
        return float(samples) if count is None else count


def call_loss(loss_fn: Loss, output: Any, target: Any) -> Tensor:
    """The loss, called with a target if there is one."""
    return loss_fn(output) if target is NO_TARGET else loss_fn(output, target)


def token_count(loss_fn: Loss, target: Any) -> float | None:
    """The number of elements (or their weight) that one of torch's losses averages over; None for others.

    >>> token_count(nn.CrossEntropyLoss(), torch.tensor([1, -100, 2]))
    2.0
    """
    function, options = _stated(loss_fn)
    by_element = function in _ELEMENT_MEANS or type(function) in _ELEMENT_MEANS
    if not by_element and function not in _TOKEN_MEANS and not isinstance(function, _TOKEN_MODULES):
        return None
    if options.get("reduction", "mean") != "mean" or not isinstance(target, Tensor):
        return None
    if by_element:
        return float(target.numel())
    if target.is_floating_point():
        return None
    counted = target != options.get("ignore_index", -100)
    if (weight := options.get("weight")) is not None:
        return float(weight[target[counted]].sum())
    return float(counted.sum())


def _stated(loss_fn: Any) -> tuple[Any, dict[str, Any]]:
    """The function or module of a loss, and the options in it that decide what it averages over."""
    if isinstance(loss_fn, functools.partial) and not loss_fn.args:
        return loss_fn.func, dict(loss_fn.keywords)
    names = ("weight", "ignore_index", "reduction") if isinstance(loss_fn, nn.Module) else ()
    return loss_fn, {name: getattr(loss_fn, name) for name in names if hasattr(loss_fn, name)}


def _zero(output: Any) -> Tensor:
    """Zero, with a gradient of zero for every output, also for NaN."""
    tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
    return torch.stack(
        [t.masked_fill(torch.ones_like(t, dtype=torch.bool), 0).sum().float() for t in tensors]
    ).sum()


def own_scale(
    scaler: torch.amp.GradScaler | None, parameters: Sequence[nn.Parameter], device: torch.device
) -> float | None:
    """The factor of this rank's scaler; `NOT_SCALED` without a scaler, None without trainable parameters."""
    trains = any(p.requires_grad for p in parameters)
    if scaler is None or not scaler.is_enabled():
        return NOT_SCALED if trains else None
    if not trains:
        raise PartitionError(
            "this rank has no trainable parameter, and its GradScaler cannot step:"
            " give scaler=None on this rank"
        )
    # `scale` also initializes the scaler, as in a plain loop.
    return float(scaler.scale(torch.ones((), device=device)))


def share_overflow(parameters: Sequence[nn.Parameter], world: World, device: torch.device) -> None:
    """Put an overflow into the gradients of every rank if one rank has one, so that all scalers skip."""
    gradients = [gradient_elements(p) for p in parameters if p.grad is not None]
    over = any(not bool(torch.isfinite(g).all()) for g in gradients)
    flags = world.gather(torch.tensor([int(over)], device=device))
    first = next((g for g in gradients if g.numel()), None)
    if first is not None and any(int(flag) for flag in flags.values()):
        first[(0,) * first.ndim] = float("inf")


# Parameters that the loss does not depend on get no gradient, as in the plain model.
#
# Every value that crosses a border gets a gradient: zeros if the loss does not use it. With a gradient of
# zeros, an optimizer would apply weight decay, which the plain loop does not.
#
# The last rank records which outputs have a gradient, and sends it with the flags at the end of each step.
# A flag with every wire would cost a message for each micro-batch and border.


_STOPS = {torch.ops.aten.detach.default, torch.ops.aten.detach_.default}  # gradients do not pass these


class UnusedParameters:
    """Removes the zero gradients of parameters that a loss does not depend on.

    For stages cut along modules, the dependencies are unknown: their zeros stay.
    """

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        self._parts = [stage for stage in stages if isinstance(stage, Stage)]
        self._known = len(self._parts) == len(stages)
        self._reached: dict[tuple[bool, ...], set[int]] = {}

    def forget(self, fresh: Sequence[nn.Parameter], used: Sequence[bool]) -> None:
        """Remove zero gradients that a step gave to parameters which its loss does not use.

        `fresh` are the parameters without a gradient before the step. `used` tells for each output whether
        the loss uses it.
        """
        if all(used) or not self._known:
            return
        reached = self._reached.setdefault(tuple(used), set())
        if not reached:
            reached |= reached_states(self._parts, used)
        for parameter in fresh:
            if id(parameter) not in reached and parameter.grad is not None and not bool(parameter.grad.any()):
                parameter.grad = None


def reached_states(stages: Sequence[Stage], used: Sequence[bool]) -> set[int]:
    """The ids of the parameters and buffers that the used outputs of the last stage depend on."""
    outputs = map(value_name, stages[-1].form.gives)
    needed = {name for name, is_used in zip(outputs, used, strict=True) if is_used}
    reached: set[int] = set()
    for stage in reversed(stages):
        takes, arguments = set(map(value_name, stage.form.takes)), _arguments(stage, needed)
        reached |= {id(state) for name, state in stage.states().items() if name in arguments}
        needed = takes & (arguments | needed)
    return reached


def _arguments(stage: Stage, needed: set[str]) -> set[str]:
    """The arguments of a stage's program that the needed values depend on."""
    nodes, form = list(stage.program.graph.nodes), stage.form
    if any(_writes(node) for node in nodes):  # an alias of the written tensor may be used elsewhere
        return set(form.arguments)
    results = nodes[-1].args[0]
    pairs = zip(results, form.results, strict=True)
    waiting = [node for node, name in pairs if name in needed and isinstance(node, fx.Node)]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        before = [] if node.target in _STOPS else [n for n in node.all_input_nodes if n not in seen]
        seen.update(before)
        waiting += before
    placeholders = [node for node in nodes if node.op == "placeholder"]
    return {name for node, name in zip(placeholders, form.arguments, strict=True) if node in seen}


def _writes(node: fx.Node) -> bool:
    """Whether a node writes in place to a tensor that may have a gradient: any but a buffer."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return False
    target = node.args[0] if node.args else None
    value = target.meta.get("val") if isinstance(target, fx.Node) else None
    is_state = isinstance(target, fx.Node) and target.op == "placeholder"
    return not (is_state and isinstance(value, Tensor) and not value.requires_grad)
