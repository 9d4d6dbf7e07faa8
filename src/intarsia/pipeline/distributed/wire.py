"""Wires: the tensors that cross between processes.

`torch.distributed.pipelining` sends any tensor forward, but it expects a gradient for each, needs contiguous
memory, and detaches the outputs of a stage in place, which fails for views. So each border value becomes a
*wire*: a contiguous floating-point tensor, no view, which always has a gradient (zero if the value has none).
Integers cross as floats of the same width; no arithmetic changes their bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from intarsia.errors import PartitionError
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


class Enter(torch.autograd.Function):
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


class Exit(torch.autograd.Function):
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


class Alias(torch.autograd.Function):
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
