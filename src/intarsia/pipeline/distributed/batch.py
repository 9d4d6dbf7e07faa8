"""A batch cut into micro-batches, and what all ranks agree on before a step: lengths, precision, weights."""

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
from intarsia.pipeline.stages.signature import CallSignature, TensorSpec


def part_sizes(samples: int, count: int, least: int = 0) -> list[int]:
    """How many samples each micro-batch has: equal parts, of which the last may be shorter, or empty.

    A part takes `least` samples or more while there are any.

    >>> part_sizes(7, 4), part_sizes(5, 4), part_sizes(3, 4, least=2)
    ([2, 2, 2, 1], [2, 2, 1, 0], [2, 1, 0, 0])
    """
    size = max(-(-samples // count), least)
    return [min(size, max(0, samples - i * size)) for i in range(count)]


def divide(
    signature: CallSignature, tensors: Sequence[Tensor], count: int, device: torch.device
) -> tuple[list[Tensor], dict[str, int], int]:
    """The tensors of a batch, ready to be cut in equal parts, the lengths of one part, and the samples.

    The batch is brought to the front. If it does not divide, its last sample is repeated; what the stages
    give for these is cut off again, before the loss. So it is where there are fewer samples for each
    micro-batch than the capture holds for.
    """
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
    """The first of `count` micro-batches, from what `divide` made ready, as the model takes it."""
    parts = []
    for spec, tensor in zip(signature.tensors, ready, strict=True):
        axis = signature.axis(spec)
        part = tensor[: tensor.shape[0] // count]
        parts.append(part[0] if axis is None else part.movedim(0, axis))
    return parts


def divide_target(
    target: Any, count: int, axis: int, device: torch.device, least: int = 0
) -> tuple[list[Any], int]:
    """A target cut as the batch is and on its device, and its samples (-1 without a target)."""
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
    """The outputs of all micro-batches as the model gives them; those without a batch are stacked."""
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
    """The outputs of one micro-batch for its first samples: the others are there to fill it up."""
    parts = []
    for spec, output in zip(specs, bare(outputs, specs), strict=True):
        axis = signature.axis(spec)
        short = axis is not None and output.shape[axis] > samples
        parts.append(output.narrow(axis, 0, samples) if short and axis is not None else output)
    return parts


def bare(outputs: Sequence[Tensor], specs: Sequence[TensorSpec]) -> list[Tensor]:
    """The outputs of one micro-batch, numbers without the dimension they travelled with."""
    return [o.reshape(()) if s.shape == () else o for o, s in zip(outputs, specs, strict=True)]


_PRECISIONS: tuple[Precision, ...] = (None, torch.bfloat16, torch.float16, torch.float32)
_UNKNOWN = -1  # a number that another rank knows
_NO_MATTER = 0.0  # of a rank that learns nothing


@dataclass(frozen=True)
class AgreedBatch:
    """One rank's batch: tensors on the first, targets on the last, the lengths of a micro-batch on all."""

    tensors: Sequence[Tensor]
    targets: Sequence[Any]
    weights: Sequence[float]  # how much the loss of each micro-batch counts
    total: float  # the sum of all weights, of every replica
    lengths: dict[str, int]
    sizes: list[int]  # the samples of each micro-batch
    scale: float  # what scalers multiply the loss by
    is_scaled: bool  # whether any rank that learns has a scaler


@dataclass(frozen=True)
class Terms:
    """What a rank needs to know to agree: how calls look, who takes part, and which part it plays."""

    signature: CallSignature
    world: World
    n_microbatches: int
    device: torch.device
    first: int  # the rank that takes inputs, and the one that takes targets
    last: int
    target_axis: int
    whole: str  # why the last micro-batch may not be shorter than the others; empty if it may


@dataclass(frozen=True)
class _Claim:
    """What one rank says of a batch."""

    refused: bool
    precision: int
    scale: float
    weight: float
    samples: int
    aimed: int  # the samples of the target
    lengths: tuple[int, ...]

    def tensor(self, device: torch.device) -> Tensor:
        numbers = [self.refused, self.precision, self.scale, self.weight, self.samples, self.aimed]
        return torch.tensor([*map(float, numbers), *self.lengths], dtype=torch.float64, device=device)

    @staticmethod
    def of(numbers: Tensor) -> _Claim:
        refused, precision, scale, weight, samples, aimed, *lengths = numbers.tolist()
        return _Claim(
            bool(refused), int(precision), scale, weight, int(samples), int(aimed), tuple(map(int, lengths))
        )


def agree(
    terms: Terms,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Any,
    loss: MicrobatchLoss | None,
    own_scale: Callable[[], float | None],
) -> AgreedBatch:
    """Let every rank of every replica know this batch's lengths and weights, or that some rank refused it.

    `own_scale` gives what this rank's scaler multiplies by, `NOT_SCALED`, or None where nothing learns.
    """
    names, count, world = sorted(terms.signature.example), terms.n_microbatches, terms.world
    least = terms.signature.least
    tensors: list[Tensor] = []
    targets: list[Any] = []
    weights: list[float] = []
    lengths: dict[str, int] = {}
    samples = aimed = _UNKNOWN
    scale: float | None = None
    refusal: Exception | None = None
    try:
        scale = None if loss is None else own_scale()
        if world.rank == terms.first:
            leaves = terms.signature.flatten(args, kwargs)
            tensors, lengths, samples = divide(terms.signature, leaves, count, terms.device)
        if world.rank == terms.last and loss is not None:
            targets, aimed = divide_target(target, count, terms.target_axis, terms.device, least)
            weights = _weights(terms, loss, targets, aimed)
    except Exception as error:
        refusal = error
    mine = _Claim(
        refusal is not None,
        _PRECISIONS.index(current_precision(terms.device)),
        _NO_MATTER if scale is None else scale,
        sum(weights) if weights else _UNKNOWN,
        samples,
        aimed,
        tuple(lengths.get(n, _UNKNOWN) for n in names),
    )
    claims = {rank: _Claim.of(t) for rank, t in world.gather(mine.tensor(terms.device)).items()}
    if refusal is not None:
        raise refusal
    _check_ranks(world.me, claims)
    totals = []
    for row in world.table:  # of every replica, so that all ranks say the same
        first, last = claims[row[terms.first]], claims[row[terms.last]]
        _check_samples(terms, first.samples, last, loss)
        totals.append(last.weight if last.weight != _UNKNOWN else float(first.samples))
    first = claims[world.mine[terms.first]]
    sizes = part_sizes(first.samples, count, least)
    agreed = dict(zip(names, first.lengths, strict=True))
    counts = weights or [float(n) for n in sizes]
    scaled = max(one.scale for one in claims.values())
    is_scaled = scaled > _NO_MATTER
    return AgreedBatch(
        tensors, targets, counts, sum(totals), agreed, sizes, scaled if is_scaled else 1.0, is_scaled
    )


def _weights(terms: Terms, loss: MicrobatchLoss, targets: Sequence[Any], aimed: int) -> list[float]:
    """The weights of the micro-batches; none where only the first rank knows the samples they are."""
    if terms.world.replicas > 1 and not loss.knows(targets[0]):
        raise InputError(
            "replicas may average over different numbers, and of this loss it is not known over how many:"
            " give loss_weight=, a function of a micro-batch's target, or 'equal' for a mean over samples"
        )
    if aimed == _UNKNOWN:
        return loss.weigh(targets, [1] * len(targets)) if callable(loss.weight) else []
    return loss.weigh(targets, part_sizes(aimed, len(targets), terms.signature.least))


def _check_ranks(me: int, claims: Mapping[int, _Claim]) -> None:
    mine = claims[me]
    for rank, other in claims.items():
        if other.refused:
            raise InputError(f"rank {rank} refused this batch; its own error says why")
        if other.precision != mine.precision:
            words = [_autocast(_PRECISIONS[t.precision]) for t in (mine, other)]
            raise InputError(f"rank {me} steps {words[0]}, but rank {rank} {words[1]}")
        if _NO_MATTER not in (other.scale, mine.scale) and other.scale != mine.scale:
            scales = [1.0 if one.scale == NOT_SCALED else one.scale for one in (mine, other)]
            raise InputError(
                f"rank {me} scales gradients by {scales[0]:g}, but rank {rank} by {scales[1]:g}: every rank"
                " that learns needs a scaler, and all must do the same steps"
            )


def _check_samples(terms: Terms, samples: int, last: _Claim, loss: MicrobatchLoss | None) -> None:
    if last.aimed not in (_UNKNOWN, samples):
        raise InputError(f"the batch holds {samples} samples, and the target {last.aimed}")
    least = terms.signature.least
    if len(set(part_sizes(samples, terms.n_microbatches, least))) == 1 and not 0 < samples < least:
        return
    weighed = loss is not None and last.aimed == _UNKNOWN and last.weight != _UNKNOWN
    reason = terms.whole or ("loss_weight cannot tell them apart without a target" if weighed else "")
    if reason:
        raise InputError(
            f"the batch holds {samples} samples, which n_microbatches={terms.n_microbatches} does not divide"
            f"{f' into {least} or more' if least > 1 else ''}, and {reason}; drop or pad the rest of the last"
            " batch"
        )


def _autocast(precision: Precision) -> str:
    return "without autocast" if precision is None else f"under autocast to {precision}"
