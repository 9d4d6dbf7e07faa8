"""CUDA streams, and the CPU, which has none; copies and waits between them are autograd nodes.

compute stream of stage j     ──task──┐ Wait                       ┌ Wait ──task──
copy streams of (j, j+1)              └────── Copy ────────────────┘
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor


class CPUStreamType:
    """The type of `CPUStream`, the one stream of the CPU: work on it is always already in order."""

    def __repr__(self) -> str:
        return "CPUStream"


CPUStream: CPUStreamType = CPUStreamType()

AbstractStream: TypeAlias = torch.cuda.Stream | CPUStreamType


def is_cuda(stream: AbstractStream) -> TypeGuard[torch.cuda.Stream]:
    """Whether the stream is a CUDA stream."""
    return stream is not CPUStream


def new_stream(device: torch.device) -> AbstractStream:
    """A new stream on a device."""
    if device.type != "cuda":
        return CPUStream
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def current_stream(device: torch.device) -> AbstractStream:
    """The stream work is put on now."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else CPUStream


def default_stream(device: torch.device) -> AbstractStream:
    """The stream work is put on when nobody chose one."""
    return torch.cuda.default_stream(device) if device.type == "cuda" else CPUStream


@contextmanager
def use_device(device: torch.device) -> Iterator[None]:
    """Make a CUDA device the current one; the CPU needs no choosing."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        yield


@contextmanager
def use_stream(stream: AbstractStream) -> Iterator[None]:
    """Put work on a stream."""
    if not is_cuda(stream):
        yield
        return
    with torch.cuda.stream(stream):
        yield


def get_device(stream: AbstractStream) -> torch.device:
    """The device a stream belongs to."""
    return torch.device(stream.device) if is_cuda(stream) else torch.device("cpu")


def wait_stream(source: AbstractStream, target: AbstractStream) -> None:
    """Let `source` wait until everything now on `target` is done."""
    if not is_cuda(target):
        return  # what the CPU did is done
    if is_cuda(source):
        source.wait_stream(target)
    else:
        target.synchronize()  # only the host itself can wait here


def record_stream(tensor: Tensor, stream: AbstractStream) -> None:
    """Tell the allocator that a stream uses a tensor, so that its memory is not reused too early."""
    if is_cuda(stream) and tensor.is_cuda:
        # record_stream remembers the storage, so the empty slice of a phony or of a view will do.
        tensor.record_stream(stream)


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
