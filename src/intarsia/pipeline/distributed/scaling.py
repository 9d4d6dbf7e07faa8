"""Gradient scalers, one on each rank that learns: all scale by the same number and skip the same steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from intarsia.errors import PartitionError
from intarsia.pipeline.distributed.agreement import NOT_SCALED
from intarsia.pipeline.distributed.world import World


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
