"""Wires: the tensors that cross between processes.

`torch.distributed.pipelining` sends any tensor forward, but it expects a gradient for each, needs contiguous
memory, and detaches the outputs of a stage in place, which fails for views. So each border value becomes a
*wire*: a contiguous floating-point tensor, no view, which always has a gradient (zero if the value has none).
Integers cross as floats of the same width; no arithmetic changes their bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from intarsia.errors import PartitionError, PipelineError
from intarsia.pipeline.stages.program import recompute_contexts
from intarsia.pipeline.stages.signature import TensorSpec

# For integers, the float of the same width that carries their bits.
_CARRIER = {
    torch.int64: torch.float64,
    torch.int32: torch.float32,
    torch.int16: torch.float16,
}
# No float of their width can be sent by every backend. Half precision represents their values exactly.
_NARROW = {torch.bool, torch.uint8, torch.int8}
_COMPLEX = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def wire_spec(spec: TensorSpec | str, lengths: Mapping[str, int], device: str = "meta") -> torch.Tensor:
    """An empty tensor with the shape and dtype of a value's wire."""
    if isinstance(spec, str):
        raise PartitionError(
            f"{spec}, a number read from data, crosses a border; it cannot be sent between processes:"
            " choose other cuts with cuts=..."
        )
    shape, dtype = spec.sizes(lengths), spec.dtype
    if dtype in _COMPLEX:
        shape, dtype = (*shape, 2), _COMPLEX[dtype]
    elif dtype in _NARROW:
        dtype = torch.float16
    elif dtype in _CARRIER:
        dtype = _CARRIER[dtype]
    elif not dtype.is_floating_point:
        raise PartitionError(f"{spec} crosses a border; {dtype} cannot be sent between processes")
    return torch.empty(shape, dtype=dtype, device=device, requires_grad=True)


def _encode(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj()).detach()
    value = value.contiguous()
    if value.dtype in _CARRIER:
        return value.view(_CARRIER[value.dtype])
    return value.to(torch.float16) if value.dtype in _NARROW else value


def _decode(wire: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    wire = wire.detach()
    if dtype in _COMPLEX:
        return torch.view_as_complex(wire)
    if dtype in _CARRIER:
        return wire.view(dtype)
    return wire.to(dtype) if dtype in _NARROW else wire


def _real(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.view_as_complex(grad) if dtype in _COMPLEX else grad


def _is_differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


class _Enter(torch.autograd.Function):
    """Wires to values; the gradient of an integer is zero."""

    @staticmethod
    def forward(ctx: Any, dtypes: Sequence[torch.dtype], *wires: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.dtypes, ctx.shapes = dtypes, [(w.shape, w.dtype, w.device) for w in wires]
        values = tuple(_decode(w, d) for w, d in zip(wires, dtypes, strict=True))
        ctx.mark_non_differentiable(*[v for v in values if not _is_differentiable(v.dtype)])
        return values

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wires = zip(grads, ctx.dtypes, ctx.shapes, strict=True)
        return None, *(
            _encode(grad) if _is_differentiable(dtype) else torch.zeros(shape, dtype=carrier, device=device)
            for grad, dtype, (shape, carrier, device) in wires
        )


class _Exit(torch.autograd.Function):
    """Values to wires; through `anchor`, every wire requires a gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.dtypes = [v.dtype for v in values]
        return tuple(_encode(v) for v in values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # No alias (such as `detach`): autograd could store it as a parameter's gradient, and its memory is
        # the receive buffer of the next step.
        pairs = zip(grads, ctx.dtypes, strict=True)
        return None, *(_real(grad, dtype) if _is_differentiable(dtype) else None for grad, dtype in pairs)


@dataclass(frozen=True)
class Wiring:
    """The inputs and outputs of a stage, for micro-batches of these lengths."""

    takes: Sequence[TensorSpec]
    gives: Sequence[TensorSpec]
    axes: Sequence[int | None]  # the batch axis of each input; None for an input that is not divided
    lengths: Mapping[str, int]
    first: bool
    last: bool


class WiredStage(nn.Module):
    """A stage between wires. The first stage takes plain tensors, and the last stage returns them.

    The dtypes and shapes of outputs must be those that the ranks agreed on. With `recompute`, only the inputs
    of a micro-batch are kept, and the stage runs again in its backward pass.
    """

    def __init__(self, stage: nn.Module, wiring: Wiring, *, recompute: bool, used: set[int]) -> None:
        super().__init__()
        self.stage = stage
        self.wiring = wiring
        self.dtypes: tuple[Any, ...] = tuple(t.dtype for t in wiring.takes)
        self.gives: tuple[tuple[TensorSpec, tuple[int, ...]], ...] = tuple(
            (spec, spec.sizes(wiring.lengths)) for spec in wiring.gives
        )
        self.recompute: bool = recompute
        self.used = used  # receives the numbers of the last stage's outputs that have a gradient

    def forward(self, *wires: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The wires after the stage, from those before it."""
        if self.wiring.first:
            # Inputs have the batch in front; an input that is not divided has an extra dimension.
            pairs = zip(wires, self.wiring.axes, strict=True)
            values = tuple(w[0] if axis is None else w.movedim(0, axis) for w, axis in pairs)
        else:
            values = _Enter.apply(self.dtypes, *wires)  # type: ignore[no-untyped-call]
        outputs = self._run(values)
        for (spec, shape), output in zip(self.gives, outputs, strict=True):
            if output.dtype != spec.dtype or tuple(output.shape) != shape:
                raise PipelineError(
                    f"{spec.name} is {output.dtype} of shape {tuple(output.shape)}, but the ranks agreed on"
                    f" {spec.dtype} of shape {shape}"
                )
        if self.wiring.last:
            # Aliases: torch's runtime detaches the outputs in place, and an output may be an input.
            return tuple(_Alias.apply(o, i, self.used) for i, o in enumerate(outputs))  # type: ignore[no-untyped-call]
        anchor = torch.zeros((), device=outputs[0].device, requires_grad=torch.is_grad_enabled())
        return tuple(_Exit.apply(anchor, *outputs))  # type: ignore[no-untyped-call]

    def empty_outputs(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Zeros with the form of the outputs, for a step that failed here."""
        zeros = [torch.zeros(shape, dtype=spec.dtype, device=device) for spec, shape in self.gives]
        if self.wiring.last:
            ones = [z.reshape(1) if z.ndim == 0 else z for z in zeros]
            return tuple(z.requires_grad_(z.is_floating_point() and torch.is_grad_enabled()) for z in ones)
        anchor = torch.zeros((), device=device, requires_grad=torch.is_grad_enabled())
        return tuple(_Exit.apply(anchor, *zeros))  # type: ignore[no-untyped-call]

    def _run(self, values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if not (self.recompute and torch.is_grad_enabled()):
            return tuple(self.stage(*values))
        before = [v._version for v in values]
        outputs = checkpoint(self.stage, *values, use_reentrant=False, context_fn=recompute_contexts)
        if [v._version for v in values] != before:
            raise PipelineError("the stage changes its input in place, so it cannot be recomputed")
        return tuple(outputs)


class _Alias(torch.autograd.Function):
    """An alias of a tensor with a node of its own; a scalar gets a dimension, to be joined with others.

    The backward pass, which runs only if there is a gradient, adds the tensor's number to `used`.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, number: int, used: set[int]) -> torch.Tensor:
        ctx.shape, ctx.number, ctx.used = value.shape, number, used
        return value.detach().reshape(1) if value.ndim == 0 else value.detach().contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.used.add(ctx.number)
        return grad.reshape(ctx.shape), None, None
