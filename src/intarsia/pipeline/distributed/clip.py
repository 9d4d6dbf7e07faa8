"""Clipping gradients by their norm over all ranks, as for the plain model."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from intarsia.pipeline.distributed.sharded import own_part, whole

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def clip_by_global_norm(
    parameters: Sequence[nn.Parameter],
    counted: Sequence[nn.Parameter],
    max_norm: float,
    norm_type: float,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Tensor:
    """Scale the gradients of `parameters` so that the norm over every rank's `counted` is at most `max_norm`.

    A parameter that several ranks hold is counted by one of them. Returns the norm before clipping.
    """
    gradients = [p.grad for p in counted if p.grad is not None]
    # Ranks may hold gradients of different dtypes, or none: what is sent is float64 on all of them.
    # Beside plain ones they may be sharded, and torch does not take both at once.
    kinds = [[g for g in gradients if isinstance(g, DTensor) is one] for one in (True, False)]
    norms = [whole(get_total_norm(kind, norm_type)).to(device) for kind in kinds if kind]
    wide = get_total_norm(norms, norm_type).to(device).double()
    if math.isinf(norm_type):
        dist.all_reduce(wide, dist.ReduceOp.MAX, group=group)
        total = wide
    else:
        powered = wide**norm_type
        dist.all_reduce(powered, group=group)
        total = powered ** (1.0 / norm_type)
    total = total.to(_common_dtype(gradients, group, device))
    held = []  # what this rank holds of the gradients, in the same memory
    for parameter in parameters:
        if parameter.grad is not None:
            held.append(nn.Parameter(own_part(parameter.detach())))
            held[-1].grad = own_part(parameter.grad)
    clip_grads_with_norm_(held, max_norm, total)
    return total


def _common_dtype(
    gradients: Sequence[Tensor], group: dist.ProcessGroup | None, device: torch.device
) -> torch.dtype:
    """The dtype that the norm of all ranks' gradients together would have."""
    own = {gradient.real.dtype if gradient.is_complex() else gradient.dtype for gradient in gradients}
    held = torch.tensor([float(dtype in own) for dtype in _DTYPES], device=device)
    dist.all_reduce(held, dist.ReduceOp.MAX, group=group)
    present = [dtype for dtype, count in zip(_DTYPES, held.tolist(), strict=True) if count]
    return functools.reduce(torch.promote_types, present or [torch.float32])
