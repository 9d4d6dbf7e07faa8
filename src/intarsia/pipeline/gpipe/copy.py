"""Copies between devices on their own streams, and waits between streams, as autograd nodes.

compute stream of stage j     ──task──┐ Wait                       ┌ Wait ──task──
copy streams of (j, j+1)              └────── Copy ────────────────┘
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from intarsia.pipeline.gpipe.stream import (
    AbstractStream,
    current_stream,
    get_device,
    record_stream,
    use_stream,
    wait_stream,
)


def copy_tensors(source: AbstractStream, target: AbstractStream, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copy tensors to the target stream's device on the two streams; None stays None."""
    device = get_device(target)
    user = current_stream(device)
    copies: list[Tensor | None] = []
    with use_stream(source), use_stream(target):
        for tensor in tensors:
            if tensor is None:  # a gradient nobody asked for
                copies.append(None)
                continue
            # A copy to the host must have arrived before the host reads it.
            copied = tensor.detach().to(device, non_blocking=device.type == "cuda")
            # Each was made on one stream and is used on another; the allocator must know.
            record_stream(tensor, source)
            record_stream(copied, user)
            copies.append(copied)
    return tuple(copies)


class Copy(torch.autograd.Function):
    """Copies forward from one stream's device to the other's, and the gradients back."""

    @staticmethod
    def forward(ctx: Any, source: AbstractStream, target: AbstractStream, *inputs: Tensor) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.source, ctx.target = source, target
        return copy_tensors(source, target, inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, None, *copy_tensors(ctx.target, ctx.source, grads)


class Wait(torch.autograd.Function):
    """Lets the target stream wait for the source stream; in the backward pass the other way round."""

    @staticmethod
    def forward(ctx: Any, source: AbstractStream, target: AbstractStream, *inputs: Tensor) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.source, ctx.target = source, target
        wait_stream(target, source)
        return tuple(x.detach() for x in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        wait_stream(ctx.source, ctx.target)
        return None, None, *grads
