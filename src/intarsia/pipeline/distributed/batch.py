"""A batch and its target cut into micro-batches, in the form torch's schedules take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from intarsia.errors import InputError
from intarsia.pipeline.distributed.loss import NO_TARGET
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
    found = []
    for spec, tensor in zip(signature.tensors, ready, strict=True):
        axis = signature.axis(spec)
        part = tensor[: tensor.shape[0] // count]
        found.append(part[0] if axis is None else part.movedim(0, axis))
    return found


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
    found = []
    for spec, output in zip(specs, bare(outputs, specs), strict=True):
        axis = signature.axis(spec)
        short = axis is not None and output.shape[axis] > samples
        found.append(output.narrow(axis, 0, samples) if short and axis is not None else output)
    return found


def bare(outputs: Sequence[Tensor], specs: Sequence[TensorSpec]) -> list[Tensor]:
    """The outputs of one micro-batch, numbers without the dimension they travelled with."""
    return [o.reshape(()) if s.shape == () else o for o, s in zip(outputs, specs, strict=True)]
