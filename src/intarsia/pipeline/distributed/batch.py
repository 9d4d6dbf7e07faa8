"""A batch and its target cut into equal micro-batches, in the form torch's schedules take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from intarsia.errors import InputError
from intarsia.pipeline.distributed.loss import NO_TARGET
from intarsia.pipeline.stages.signature import CallSignature, TensorSpec


def divide(
    signature: CallSignature, tensors: Sequence[Tensor], count: int, device: torch.device
) -> tuple[list[Tensor], dict[str, int]]:
    """The tensors of a batch, ready to be cut in equal parts, and the lengths of one part."""
    parts, ready = [], []
    for spec, tensor in zip(signature.tensors, tensors, strict=True):
        if not signature.splits(spec):
            parts.append(tensor)
            ready.append(tensor.to(device).unsqueeze(0).expand(count, *tensor.shape).contiguous())
            continue
        if tensor.shape[0] % count:
            raise InputError(
                f"{spec.name} holds {tensor.shape[0]} samples, which n_microbatches={count} does not divide;"
                " drop or pad the rest of the last batch"
            )
        parts.append(tensor[: tensor.shape[0] // count])
        ready.append(tensor.to(device).contiguous())
    return ready, signature.lengths(parts)


def divide_target(target: Any, count: int) -> list[Any]:
    """A target cut in equal parts along the batch, whatever its structure."""
    if target is None:
        return [NO_TARGET] * count
    leaves, spec = pytree.tree_flatten(target)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise InputError(
                f"the target has a {type(leaf).__name__}, which n_microbatches={count} does not divide"
            )
        if leaf.ndim == 0 or leaf.shape[0] % count:
            raise InputError(
                f"the target has shape {tuple(leaf.shape)}, which n_microbatches={count} does not divide"
            )
    columns = [leaf.chunk(count) for leaf in leaves]
    return [pytree.tree_unflatten([c[i] for c in columns], spec) for i in range(count)]


def join(signature: CallSignature, specs: Sequence[TensorSpec], chunks: Sequence[Sequence[Tensor]]) -> Any:
    """The outputs of all micro-batches as the model gives them; those without a batch are stacked."""
    joined = []
    for spec, column in zip(specs, zip(*(bare(c, specs) for c in chunks), strict=True), strict=True):
        joined.append(torch.cat(column) if signature.splits(spec) else torch.stack(column))
    return signature.unflatten(joined)


def bare(outputs: Sequence[Tensor], specs: Sequence[TensorSpec]) -> list[Tensor]:
    """The outputs of one micro-batch, numbers without the dimension they travelled with."""
    return [o.reshape(()) if s.shape == () else o for o, s in zip(outputs, specs, strict=True)]
