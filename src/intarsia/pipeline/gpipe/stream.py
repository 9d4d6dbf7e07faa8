"""Streams of devices, None for the CPU; copies and waits between them are autograd nodes.

compute stream of stage j     ──task──┐ Wait                       ┌ Wait ──task──
copy streams of (j, j+1)              └────── Copy ────────────────┘
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor

AbstractStream: TypeAlias = torch.cuda.Stream | None
CPUStream: None = None  # the CPU has no streams


def indexed(device: torch.device) -> torch.device:
    """The device with an index, so that "cuda" and "cuda:0" compare equal."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def is_cuda(stream: AbstractStream) -> TypeGuard[torch.cuda.Stream]:
    """Whether the stream is a CUDA stream."""
    return stream is not None


def new_stream(device: torch.device) -> AbstractStream:
    """A new stream on a device."""
    if device.type != "cuda":
        return CPUStream
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def current_stream(device: torch.device) -> AbstractStream:
    """The current stream of a device."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else CPUStream


def use_device(device: torch.device) -> AbstractContextManager[None]:
    """Make a CUDA device the current one; no effect for the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def use_stream(stream: AbstractStream) -> AbstractContextManager[None]:
    """Make a stream the current one; no effect for the CPU."""
    return torch.cuda.stream(stream) if is_cuda(stream) else nullcontext()


def get_device(stream: AbstractStream) -> torch.device:
    """The device of a stream."""
    return torch.device(stream.device) if is_cuda(stream) else torch.device("cpu")


def wait_stream(source: AbstractStream, target: AbstractStream) -> None:
    """Make `source` wait for all work that is now on `target`."""
    if not is_cuda(target):
        return  # the CPU's work is done
    if is_cuda(source):
        source.wait_stream(target)
    else:
        target.synchronize()  # the host waits


def record_stream(tensor: Tensor, stream: AbstractStream) -> None:
    """Tell the allocator that a stream uses a tensor, so that its memory is not reused too early."""
    if is_cuda(stream) and tensor.is_cuda:
        tensor.record_stream(stream)


def copy_tensors(source: AbstractStream, target: AbstractStream, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """The tensors copied to the target stream's device, on the two streams; None stays None."""
    device = get_device(target)
    user = current_stream(device)
    copies: list[Tensor | None] = []
    with use_stream(source), use_stream(target):
        for tensor in tensors:
            if tensor is None:  # a gradient that is not needed
                copies.append(None)
                continue
            # A copy to the host blocks, so that the host does not read it too early.
            copied = tensor.detach().to(device, non_blocking=device.type == "cuda")
            # Each tensor was allocated on one stream and is used on another.
            record_stream(tensor, source)
            record_stream(copied, user)
            copies.append(copied)
    return tuple(copies)


class Copy(torch.autograd.Function):
    """Copies tensors from one stream's device to the other's, and the gradients back."""

    @staticmethod
    def forward(ctx: Any, source: AbstractStream, target: AbstractStream, *inputs: Tensor) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.source, ctx.target = source, target
        return copy_tensors(source, target, inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, None, *copy_tensors(ctx.target, ctx.source, grads)


class Wait(torch.autograd.Function):
    """Makes the target stream wait for the source stream; in the backward pass, the source for the target."""

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


# Explicit order in the backward pass: a joined tensor runs its backward before the forked one.
#
#          fork       join
#     x ───┬─── x'  y ───┬─── y'    backward reaches y' first, then (through the phony) x'
#          └──phony──────┘


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
