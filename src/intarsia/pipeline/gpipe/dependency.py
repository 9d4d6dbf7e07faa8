"""Explicit order in the backward pass: a joined tensor runs its backward before the forked one.

    fork             join
x ───┬─── x'     y ───┬─── y'       backward reaches y' first, then (through the phony) x'
     └──phony─────────┘
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_phonies: dict[tuple[torch.device, bool], Tensor] = {}


def get_phony(device: torch.device, *, requires_grad: bool) -> Tensor:
    """The phony of a device: a tensor without elements, created once, that orders the backward pass.

    >>> get_phony(torch.device("cpu"), requires_grad=False).shape
    torch.Size([0])
    """
    key = (device, requires_grad)
    if key not in _phonies:
        # The phony is used outside the caller's mode too, and an inference tensor cannot be in a graph.
        with torch.inference_mode(False):
            _phonies[key] = torch.empty(0, device=device, requires_grad=requires_grad)
    return _phonies[key]


def fork(input: Tensor) -> tuple[Tensor, Tensor]:
    """The tensor, and a phony that branches off it. Without gradients, the tensor stays as it is."""
    if torch.is_grad_enabled() and input.requires_grad:
        forked, phony = Fork.apply(input)  # type: ignore[no-untyped-call]
        return forked, phony
    return input, get_phony(input.device, requires_grad=False)


def join(input: Tensor, phony: Tensor) -> Tensor:
    """The tensor with a phony merged into it: the tensor's backward runs before the phony's."""
    if torch.is_grad_enabled() and (input.requires_grad or phony.requires_grad):
        joined: Tensor = Join.apply(input, phony)  # type: ignore[no-untyped-call]
        return joined
    return input


class Fork(torch.autograd.Function):
    """Identity with a second, empty output."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> tuple[Tensor, Tensor]:
        # If only the phony gets a gradient, the tensor has none; it must not become zeros.
        ctx.set_materialize_grads(False)
        phony = get_phony(input.device, requires_grad=False)
        return input.detach(), phony.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        return grads[0]


class Join(torch.autograd.Function):
    """Identity with a second, empty input."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, phony: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return input.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        return grads[0], None
