"""A portal takes a skip tensor from its source stage to its destination, past the stages between.

The tensor leaves the autograd graph at the source (blue), moves to another device (copy), and enters the
graph again at the destination (orange). Phonies in the micro-batch order the backward pass: orange puts the
gradient into the portal, copy moves it back, and blue returns it to the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from intarsia.pipeline.gpipe.checkpoint import is_checkpointing
from intarsia.pipeline.gpipe.microbatch import Batch
from intarsia.pipeline.gpipe.skip import Namespace, SkipLayout, SkipTracker
from intarsia.pipeline.gpipe.stream import AbstractStream, copy_tensors, fork, get_device, get_phony, join


class Portal:
    """Holds a skip tensor for `tensor_life` uses, and later its gradient."""

    def __init__(self, tensor: Any, tensor_life: int) -> None:
        self.put_tensor(tensor, tensor_life)
        self.grad: Tensor | None = None

    def blue(self) -> Tensor:
        """Take the tensor out of the graph. Returns a phony that orders its backward in the micro-batch."""
        tensor = self.use_tensor()
        if not isinstance(tensor, Tensor):  # a skip may be None
            return get_phony(torch.device("cpu"), requires_grad=False)
        phony: Tensor = PortalBlue.apply(self, tensor)  # type: ignore[no-untyped-call]
        return phony

    def orange(self, phony: Tensor) -> Any:
        """The tensor, in the graph again through the phony."""
        self.check_tensor_life()
        if not isinstance(self.tensor, Tensor):
            return self.use_tensor()
        return PortalOrange.apply(self, phony)  # type: ignore[no-untyped-call]

    def copy(self, source: AbstractStream, target: AbstractStream, phony: Tensor) -> Tensor:
        """Move the tensor to another device, and later its gradient back. Returns a phony."""
        if not isinstance(self.tensor, Tensor):
            return get_phony(get_device(target), requires_grad=False)
        copied: Tensor = PortalCopy.apply(self, source, target, phony)  # type: ignore[no-untyped-call]
        return copied

    def check_tensor_life(self) -> None:
        """Raise if all uses of the tensor are spent."""
        if self.tensor_life <= 0:
            raise RuntimeError("the skip tensor in the portal has been used up")

    def put_tensor(self, tensor: Any, tensor_life: int) -> None:
        """Put in a tensor for `tensor_life` uses."""
        self.tensor_life: int = tensor_life
        self.tensor = tensor if tensor_life > 0 else None

    def use_tensor(self) -> Any:
        """The tensor; the last use deletes it here."""
        self.check_tensor_life()
        tensor = self.tensor
        self.tensor_life -= 1
        if self.tensor_life <= 0:
            self.tensor = None
        return tensor

    def put_grad(self, grad: Tensor | None) -> None:
        """Put the gradient in."""
        self.grad = grad

    def use_grad(self) -> Tensor | None:
        """The gradient, once; None if the destination's output does not depend on the skip."""
        grad, self.grad = self.grad, None
        return grad


class PortalBlue(torch.autograd.Function):
    """Forward: the tensor leaves the graph. Backward: the gradient comes out of the portal."""

    @staticmethod
    def forward(ctx: Any, portal: Portal, tensor: Tensor) -> Tensor:
        ctx.portal = portal
        ctx.set_materialize_grads(False)
        if portal.tensor is not None:  # further uses must not keep the graph alive
            portal.tensor = tensor.detach()
        return get_phony(tensor.device, requires_grad=False).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, Tensor | None]:
        return None, ctx.portal.use_grad()


class PortalOrange(torch.autograd.Function):
    """Forward: the tensor enters the graph again. Backward: the gradient goes into the portal."""

    @staticmethod
    def forward(ctx: Any, portal: Portal, phony: Tensor) -> Tensor:
        ctx.portal = portal
        ctx.set_materialize_grads(False)
        tensor: Tensor = portal.use_tensor()
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:
        ctx.portal.put_grad(grads[0])
        return None, None


class PortalCopy(torch.autograd.Function):
    """Forward: the tensor in the portal changes device. Backward: the gradient in it does."""

    @staticmethod
    def forward(
        ctx: Any, portal: Portal, source: AbstractStream, target: AbstractStream, phony: Tensor
    ) -> Tensor:
        ctx.portal, ctx.source, ctx.target = portal, source, target
        (portal.tensor,) = copy_tensors(source, target, (portal.tensor,))
        return get_phony(get_device(target), requires_grad=False).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        (ctx.portal.grad,) = copy_tensors(ctx.target, ctx.source, (ctx.portal.grad,))
        return None, None, None, None


class SkipTrackerThroughPortals(SkipTracker):
    """Stores the skips of one micro-batch in a pipeline; skips between stages go through portals."""

    def __init__(self, skip_layout: SkipLayout) -> None:
        super().__init__()
        self.skip_layout = skip_layout
        self.portals: dict[tuple[Namespace | None, str], Portal] = {}

    def save(self, batch: Batch, ns: Namespace | None, name: str, tensor: Any) -> None:
        if not self.skip_layout.requires_copy(ns, name):
            super().save(batch, ns, name, tensor)
            return
        if (ns, name) not in self.portals:
            # Uses: blue, orange and, if the destination is recomputed, orange again.
            self.portals[(ns, name)] = portal = Portal(tensor, 3 if is_checkpointing() else 2)
        else:
            # The source is recomputed: only blue uses the tensor, for its gradient.
            portal = self.portals[(ns, name)]
            portal.put_tensor(tensor, 1)
        phony = portal.blue()
        if phony.requires_grad:
            position = _carrier(batch, name)
            batch[position] = join(batch[position], phony)

    def load(self, batch: Batch, ns: Namespace | None, name: str) -> Any:
        if not self.skip_layout.requires_copy(ns, name):
            return super().load(batch, ns, name)
        portal = self.portals[(ns, name)]
        position = _carrier(batch, name)
        batch[position], phony = fork(batch[position])
        return portal.orange(phony)

    def copy(
        self, batch: Batch, source: AbstractStream, target: AbstractStream, ns: Namespace | None, name: str
    ) -> None:
        portal = self.portals[(ns, name)]
        position = _carrier(batch, name)
        batch[position], phony = fork(batch[position])
        phony = portal.copy(source, target, phony)
        batch[position] = join(batch[position], phony)


# torchgpipe's spelling of the name.
SkipTrackerThroughPotals = SkipTrackerThroughPortals


def _carrier(batch: Batch, name: str) -> int:
    position = batch.carrier
    if position is None:
        raise TypeError(
            f"skip {name!r} cannot pass: the output of the layer has no floating-point tensor, which is"
            " needed to order its gradient"
        )
    return position
