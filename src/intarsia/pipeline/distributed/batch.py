"""A batch cut into micro-batches; lengths, precision and weights, which ranks agree on before a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from intarsia.errors import InputError
from intarsia.pipeline.distributed.borders import Precision, current_precision
from intarsia.pipeline.distributed.loss import NO_TARGET, NOT_SCALED, MicrobatchLoss
from intarsia.pipeline.distributed.world import World
from intarsia.pipeline.stages.signature import CallSignature, TensorSpec, from_front


def part_sizes(samples: int, count: int, least: int = 0) -> list[int]:
    """The samples of each micro-batch: equal parts, except that the last ones may be shorter or empty.

    A part has at least `least` samples, as long as samples remain. Unlike `chunk_sizes` in one process, there
    are always `count` parts: torch's schedules have a fixed number of steps, and buffers of one size.

    >>> part_sizes(7, 4), part_sizes(5, 4), part_sizes(3, 4, least=2)
    ([2, 2, 2, 1], [2, 2, 1, 0], [2, 1, 0, 0])
    """
    size = max(-(-samples // count), least)
    return [min(size, max(0, samples - i * size)) for i in range(count)]


def divide(
    signature: CallSignature, tensors: Sequence[Tensor], count: int, device: torch.device
) -> tuple[list[Tensor], dict[str, int], int]:
    """The tensors of a batch, ready to be cut into equal parts; the lengths of one part; and the samples.

    The batch dimension is moved to the front. If the batch does not divide, or if a part would have fewer
    samples than the graph allows, the last sample is repeated. The outputs for the copies are removed before
    the loss.
    """
    signature.samples(tensors)  # all have the same number: a shorter one would be filled up with copies
    parts, ready, samples = [], [], 0
    for spec, tensor in zip(signature.tensors, tensors, strict=True):
        axis = signature.axis(spec)
        if axis is None:
            parts.append(tensor)
            ready.append(tensor.to(device).unsqueeze(0).expand(count, *tensor.shape).contiguous())
            continue
        samples = tensor.shape[axis]
        size = max(-(-samples // count), signature.least if samples else 0)
        front = tensor.movedim(axis, 0)
        if size * count > samples:
            front = torch.cat([front, front[-1:].expand(size * count - samples, *front.shape[1:])])
        parts.append(front[:size].movedim(0, axis))
        ready.append(front.to(device).contiguous())
    return ready, signature.lengths(parts), samples


def first_part(signature: CallSignature, ready: Sequence[Tensor], count: int) -> list[Tensor]:
    """The first of `count` micro-batches, from the tensors of `divide`, in the model's form."""
    return list(from_front([t[: t.shape[0] // count] for t in ready], signature.tensor_axes))


def divide_target(
    target: Any, count: int, axis: int, device: torch.device, least: int = 0
) -> tuple[list[Any], int]:
    """A target cut like the batch, on `device`, and its samples (-1 without a target)."""
    if target is None:
        return [NO_TARGET] * count, -1
    leaves, spec = pytree.tree_flatten(target)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise InputError(
                f"the target has a {type(leaf).__name__}, which n_microbatches={count} does not divide"
            )
        if leaf.ndim <= axis or leaf.shape[axis] != leaves[0].shape[axis]:
            raise InputError(
                f"the target has shape {tuple(leaf.shape)}, which n_microbatches={count} does not divide"
                f" along axis {axis}"
            )
    samples = leaves[0].shape[axis] if leaves else -1
    columns = [leaf.to(device).split(part_sizes(samples, count, least), axis) for leaf in leaves]
    return [pytree.tree_unflatten([c[i] for c in columns], spec) for i in range(count)], samples


def join(
    signature: CallSignature, specs: Sequence[TensorSpec], chunks: Sequence[Sequence[Tensor]], samples: int
) -> Any:
    """The joined outputs of all micro-batches, as the model returns them; those without a batch, stacked."""
    joined = []
    for spec, column in zip(specs, zip(*(bare(c, specs) for c in chunks), strict=True), strict=True):
        axis = signature.axis(spec)
        if axis is None:
            joined.append(torch.stack(column))
        else:
            whole = torch.cat(column, axis)
            joined.append(whole if whole.shape[axis] == samples else whole.narrow(axis, 0, samples))
    return signature.unflatten(joined)


def real_part(
    signature: CallSignature, specs: Sequence[TensorSpec], outputs: Sequence[Tensor], samples: int
) -> list[Tensor]:
    """The outputs of one micro-batch without those for copies: the first `samples` samples."""
    parts = []
    for spec, output in zip(specs, bare(outputs, specs), strict=True):
        axis = signature.axis(spec)
        short = axis is not None and output.shape[axis] > samples
        parts.append(output.narrow(axis, 0, samples) if short and axis is not None else output)
    return parts


def bare(outputs: Sequence[Tensor], specs: Sequence[TensorSpec]) -> list[Tensor]:
    """The outputs of one micro-batch. Scalars lose the dimension that they had on the wire."""
    return [o.reshape(()) if s.shape == () else o for o, s in zip(outputs, specs, strict=True)]


_PRECISIONS: tuple[Precision, ...] = (None, torch.bfloat16, torch.float16, torch.float32)
_UNKNOWN = -1  # a number that only another rank has
_NO_SCALE = 0.0  # the scale of a rank without trainable parameters


@dataclass(frozen=True)
class AgreedBatch:
    """One rank's batch: tensors on the first rank, targets on the last, and the lengths on all."""

    tensors: Sequence[Tensor]
    targets: Sequence[Any]
    weights: Sequence[float]  # the weight of each micro-batch's loss
    total: float  # the sum of all weights, over all replicas
    lengths: dict[str, int]  # of a micro-batch
    sizes: list[int]  # the samples of each micro-batch
    scale: float  # the factor of the gradient scalers
    is_scaled: bool  # whether any rank has a scaler


@dataclass(frozen=True)
class Terms:
    """The settings of a pipeline that `agree` needs."""

    signature: CallSignature
    world: World
    n_microbatches: int
    device: torch.device
    first: int  # the rank that takes inputs
    last: int  # the rank that takes targets
    target_axis: int
    whole: str  # why the last micro-batch must not be shorter than the others; empty if it may be


@dataclass(frozen=True)
class _RankBatch:
    """One rank's numbers for a batch, which all ranks compare.

    They are sent as one tensor, in each step: an exchange of objects takes three times as long (gloo).
    """

    refused: bool
    trains: bool
    precision: int
    scale: float
    weight: float
    samples: int
    target_samples: int
    lengths: tuple[int, ...]

    def tensor(self, device: torch.device) -> Tensor:
        numbers = [self.refused, self.trains, self.precision, self.scale, self.weight]
        numbers += [self.samples, self.target_samples, *self.lengths]
        return torch.tensor(numbers, dtype=torch.float64, device=device)

    @staticmethod
    def of(numbers: Tensor) -> _RankBatch:
        refused, trains, precision, scale, weight, *counts = numbers.tolist()
        samples, targets, *lengths = map(int, counts)
        return _RankBatch(
            bool(refused), bool(trains), int(precision), scale, weight, samples, targets, tuple(lengths)
        )


def agree(
    terms: Terms,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Any,
    loss: MicrobatchLoss | None,
    own_scale: Callable[[], float | None],
) -> AgreedBatch:
    """Exchange the lengths and weights of this batch between all ranks. If one rank raises, all raise.

    `own_scale` returns the factor of this rank's scaler, `NOT_SCALED`, or None without trainable parameters.
    """
    names, count, world = sorted(terms.signature.example), terms.n_microbatches, terms.world
    least = terms.signature.least
    tensors: list[Tensor] = []
    targets: list[Any] = []
    weights: list[float] = []
    lengths: dict[str, int] = {}
    samples = target_samples = _UNKNOWN
    scale: float | None = None
    refusal: Exception | None = None
    try:
        scale = None if loss is None else own_scale()
        if world.rank == terms.first:
            leaves = terms.signature.flatten(args, kwargs)
            tensors, lengths, samples = divide(terms.signature, leaves, count, terms.device)
        if world.rank == terms.last and loss is not None:
            targets, target_samples = divide_target(target, count, terms.target_axis, terms.device, least)
            weights = _weights(terms, loss, targets, target_samples)
    except Exception as error:
        refusal = error
    mine = _RankBatch(
        refusal is not None,
        loss is not None,
        _PRECISIONS.index(current_precision(terms.device)),
        _NO_SCALE if scale is None else scale,
        sum(weights) if weights else _UNKNOWN,
        samples,
        target_samples,
        tuple(lengths.get(n, _UNKNOWN) for n in names),
    )
    ranks = {rank: _RankBatch.of(t) for rank, t in world.gather(mine.tensor(terms.device)).items()}
    if refusal is not None:
        raise refusal
    _check_ranks(world.me, ranks)
    totals = []
    for row in world.table:  # every replica is checked, so that all ranks raise the same
        first, last = ranks[row[terms.first]], ranks[row[terms.last]]
        _check_samples(terms, first.samples, last, loss)
        totals.append(last.weight if last.weight != _UNKNOWN else float(first.samples))
    first = ranks[world.mine[terms.first]]
    sizes = part_sizes(first.samples, count, least)
    agreed = dict(zip(names, first.lengths, strict=True))
    counts = weights or [float(n) for n in sizes]
    scaled = max(one.scale for one in ranks.values())
    is_scaled = scaled > _NO_SCALE
    return AgreedBatch(
        tensors, targets, counts, sum(totals), agreed, sizes, scaled if is_scaled else 1.0, is_scaled
    )


def _weights(terms: Terms, loss: MicrobatchLoss, targets: Sequence[Any], target_samples: int) -> list[float]:
    """The weights of the micro-batches; empty if only the first rank knows the samples that they need."""
    if terms.world.replicas > 1 and not loss.knows(targets[0]):
        raise InputError(
            "replicas may average over different numbers of elements, and for this loss they are not known:"
            " give loss_weight=, a function of a micro-batch's target, or 'equal' for a mean over samples"
        )
    if target_samples == _UNKNOWN:
        return loss.weigh(targets, [1] * len(targets)) if callable(loss.weight) else []
    return loss.weigh(targets, part_sizes(target_samples, len(targets), terms.signature.least))


def _check_ranks(me: int, ranks: Mapping[int, _RankBatch]) -> None:
    mine = ranks[me]
    for rank, other in ranks.items():
        if other.refused:
            raise InputError(f"rank {rank} refused this batch; see the error on that rank")
        if other.trains != mine.trains:
            words = ["calls step" if one.trains else "calls infer" for one in (mine, other)]
            raise InputError(f"rank {me} {words[0]}, but rank {rank} {words[1]}")
        if other.precision != mine.precision:
            words = [_autocast(_PRECISIONS[t.precision]) for t in (mine, other)]
            raise InputError(f"rank {me} steps {words[0]}, but rank {rank} {words[1]}")
        if _NO_SCALE not in (other.scale, mine.scale) and other.scale != mine.scale:
            scales = [1.0 if one.scale == NOT_SCALED else one.scale for one in (mine, other)]
            raise InputError(
                f"rank {me} scales gradients by {scales[0]:g}, but rank {rank} by {scales[1]:g}: every rank"
                " with trainable parameters needs a scaler, and all scalers must do the same steps"
            )


def _check_samples(terms: Terms, samples: int, last: _RankBatch, loss: MicrobatchLoss | None) -> None:
    if last.target_samples not in (_UNKNOWN, samples):
        raise InputError(f"the batch has {samples} samples, and the target {last.target_samples}")
    least = terms.signature.least
    if len(set(part_sizes(samples, terms.n_microbatches, least))) == 1 and not 0 < samples < least:
        return
    weighed = loss is not None and last.target_samples == _UNKNOWN and last.weight != _UNKNOWN
    reason = terms.whole or ("loss_weight needs a target to weigh unequal parts" if weighed else "")
    if reason:
        raise InputError(
            f"the batch has {samples} samples, which n_microbatches={terms.n_microbatches} does not divide"
            f"{f' into {least} or more' if least > 1 else ''}, and {reason}; drop or pad the last batch"
        )


def _autocast(precision: Precision) -> str:
    return "without autocast" if precision is None else f"under autocast to {precision}"
