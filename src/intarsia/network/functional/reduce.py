"""Functionals that reduce or order along axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from intarsia.network.functional.core import constant, ints, op, ops
from intarsia.network.functional.shape import Size, size_vector
from intarsia.network.network import Tensor
from intarsia.network.signature import record_signature

Reduce = Callable[..., Tensor]


def _reduce(op_type: str) -> Reduce:
    def functional(x: Tensor, axes: Sequence[int] | None = None, *, keepdims: bool = True) -> Tensor:
        return op(op_type, x, None if axes is None else ints(axes), keepdims=1 if keepdims else 0)

    functional.__name__ = functional.__qualname__ = "reduce_" + op_type.removeprefix("Reduce").lower()
    functional.__doc__ = f"ONNX `{op_type}` over axes, or over all of them."
    return record_signature(functional)


reduce_sum: Reduce = _reduce("ReduceSum")
reduce_mean: Reduce = _reduce("ReduceMean")
reduce_prod: Reduce = _reduce("ReduceProd")
reduce_max: Reduce = _reduce("ReduceMax")
reduce_min: Reduce = _reduce("ReduceMin")
reduce_l2: Reduce = _reduce("ReduceL2")
reduce_sumsquare: Reduce = _reduce("ReduceSumSquare")
reduce_logsumexp: Reduce = _reduce("ReduceLogSumExp")


@record_signature
def argmax(x: Tensor, axis: int, *, keepdims: bool = False) -> Tensor:
    """Index of the first largest element."""
    return op("ArgMax", x, axis=axis, keepdims=1 if keepdims else 0)


@record_signature
def argmin(x: Tensor, axis: int, *, keepdims: bool = False) -> Tensor:
    """Index of the first smallest element."""
    return op("ArgMin", x, axis=axis, keepdims=1 if keepdims else 0)


@record_signature
def topk(
    x: Tensor, k: Size, axis: int = -1, *, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    """The k largest (or smallest) elements and their indices."""
    values, indices = ops(
        "TopK", x, size_vector([k]), outputs=2, axis=axis, largest=int(largest), sorted=int(sorted)
    )
    return values, indices


@record_signature
def cumsum(x: Tensor, axis: int) -> Tensor:
    """Running sum along an axis."""
    return op("CumSum", x, constant(axis, ir.DataType.INT64))


@record_signature
def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """Softmax along an axis."""
    return op("Softmax", x, axis=axis)


@record_signature
def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    """The logarithm of softmax, numerically stable."""
    return op("LogSoftmax", x, axis=axis)
