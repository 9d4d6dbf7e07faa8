"""Clipping gradients by their norm over all ranks, as for the plain model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


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
    local = get_total_norm(gradients, norm_type).to(device) if gradients else torch.zeros((), device=device)
    if math.isinf(norm_type):
        dist.all_reduce(local, dist.ReduceOp.MAX, group=group)
        total = local
    else:
        powered = local**norm_type
        dist.all_reduce(powered, group=group)
        total = powered ** (1.0 / norm_type)
    clip_grads_with_norm_(parameters, max_norm, total)
    return total
