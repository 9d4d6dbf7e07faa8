"""Normalisation by batch, layer, group, instance and root mean square."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from intarsia.convert.aten.kernels import filled, is_empty, left_where, static, used, wide, with_further
from intarsia.convert.context import Context
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor, dtypes
from intarsia.network import functional as F
from intarsia.network.attributes import is_rounded

aten = torch.ops.aten


def ones(sizes: Sequence[Any], dtype: ir.DataType, value: float = 1.0) -> Tensor:
    """The default weight of a norm, or with another `value` its default shift; the sizes must be known."""
    if not all(isinstance(size, int) for size in sizes):
        raise ConversionError(
            f"normalising over sizes {tuple(sizes)} that are not known at compile time is not handled"
        )
    return F.constant(np.full(tuple(sizes), value, dtypes.to_numpy(dtype)))


def _layer_norm(input: Tensor, sizes: Sequence[int], weight: Any, bias: Any, eps: float) -> Tensor:
    x = wide(input)
    scale = ones(sizes, x.dtype) if weight is None else F.cast(weight, x.dtype)
    shift = None if bias is None else F.cast(bias, x.dtype)
    if is_rounded(eps, x.dtype):
        return _by_statistics(x, list(range(x.ndim - len(sizes), x.ndim)), eps, scale, shift)
    return F.cast(F.layer_norm(x, scale, shift, axis=-len(sizes), epsilon=eps), input.dtype)


@converter(aten.layer_norm.default, aten.native_layer_norm.default)
def layer_norm(
    ctx: Context,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    """The result; and, of the second operator, mean and reciprocal deviation."""
    axes = list(range(input.ndim - len(normalized_shape), input.ndim))
    result = _layer_norm(input, normalized_shape, weight, bias, eps)
    return with_further(ctx, result, lambda: _finite_statistics(input, axes, eps))


def _statistics(x: Tensor, axes: list[int], eps: float) -> tuple[Tensor, Tensor]:
    """Mean and reciprocal standard deviation over axes, which are kept."""
    mean = F.reduce_mean(x, axes)
    centred = F.sub(x, mean)
    variance = F.reduce_mean(F.mul(centred, centred), axes)
    return mean, F.reciprocal(F.sqrt(F.add(variance, eps)))


def _finite_statistics(x: Tensor, axes: list[int], eps: float) -> tuple[Tensor, Tensor]:
    mean, rstd = _statistics(wide(x, halves=True), axes, eps)
    return left_where(mean, F.isinf(mean)), rstd  # eager's is infinite or NaN by the order it adds in


def _by_statistics(x: Tensor, axes: list[int], eps: float, scale: Tensor, shift: Tensor | None) -> Tensor:
    """A norm whose layer would round `eps` to 32 bits, in layers that do not."""
    mean, rstd = _statistics(x, axes, eps)
    result = F.mul(F.mul(F.sub(x, mean), rstd), scale)
    return result if shift is None else F.add(result, shift)


def _along_channels(value: Tensor, rank: int) -> Tensor:
    return F.reshape(value, [-1, *[1] * (rank - 2)]) if rank > 2 else value


def _by_given(input: Tensor, weight: Any, bias: Any, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """Batch norm by running statistics."""
    x = wide(input)
    channels = mean.shape
    scale = ones(channels, x.dtype) if weight is None else F.cast(weight, x.dtype)
    shift = ones(channels, x.dtype, 0.0) if bias is None else F.cast(bias, x.dtype)
    mean, var = F.cast(mean, x.dtype), F.cast(var, x.dtype)
    if is_rounded(eps, x.dtype):
        scale = F.div(scale, F.sqrt(F.add(var, eps)))
        scale, shift, mean = (_along_channels(value, x.ndim) for value in (scale, shift, mean))
        return F.add(F.mul(F.sub(x, mean), scale), shift)
    return F.cast(F.batch_norm(x, scale, shift, mean, var, eps), input.dtype)


def _by_batch(input: Tensor, weight: Any, bias: Any, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm by the statistics of the batch itself: result, mean, reciprocal deviation."""
    x = wide(input, halves=True)
    axes = [axis for axis in range(x.ndim) if axis != 1]
    mean, rstd = _statistics(x, axes, eps)
    result = F.mul(F.sub(x, mean), rstd)
    if weight is not None:
        result = F.mul(result, _along_channels(F.cast(weight, x.dtype), x.ndim))
    if bias is not None:
        result = F.add(result, _along_channels(F.cast(bias, x.dtype), x.ndim))
    return F.cast(result, input.dtype), F.squeeze(mean, axes), F.squeeze(rstd, axes)


def _batch(
    ctx: Context, input: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, eps: float
) -> tuple[Tensor, Any, Any]:
    if is_empty(input):
        raise ConversionError("batch norm of an empty tensor is not handled")
    if not training:
        if mean is None or var is None:
            raise ConversionError("batch norm in evaluation needs running statistics")
        return _by_given(input, weight, bias, mean, var, eps), None, None
    if mean is not None or var is not None:
        raise ConversionError("training=True updates running statistics, which is not handled")
    return _by_batch(input, weight, bias, eps)


def _with_statistics(ctx: Context, results: tuple[Tensor, Any, Any]) -> Any:
    def statistics() -> list[Tensor]:  # which are empty in evaluation
        return [filled(ctx, output=i) if x is None else x for i, x in enumerate(results[1:], start=1)]

    return with_further(ctx, results[0], statistics)


@converter(
    aten.batch_norm.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_no_training.default,
    aten._batch_norm_no_update.default,
)
def batch_norm(
    ctx: Context,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    training: bool = False,
    cudnn_enabled: bool = True,
) -> Any:
    """The result; and, of all operators but the first, the statistics."""
    if isinstance(ctx.value, tuple | list) and len(ctx.value) > 3 and used(ctx.node, 3):
        raise ConversionError("the reserve of batch norm, which only training needs, is not handled")
    results = _batch(ctx, input, weight, bias, running_mean, running_var, training, eps)
    return _with_statistics(ctx, results)


def _grouped(input: Tensor, groups: int) -> Tensor:
    """`input` as (batch, groups, the rest)."""
    batch, rest = input.shape[0], input.shape[1:]
    if all(isinstance(size, int) for size in rest):
        each = int(np.prod(rest)) // groups  # type: ignore[arg-type]
        return F.reshape(input, [-1, groups, each])
    return F.reshape(input, [batch if isinstance(batch, int) else F.size(input, 0), groups, -1])


def _like(x: Tensor, model: Tensor) -> Tensor:
    """`x` in the sizes of another tensor."""
    unknown = [i for i, size in enumerate(model.shape) if not isinstance(size, int)]
    if len(unknown) > 1:
        return F.reshape(x, F.shape(model))
    return F.reshape(x, [-1 if i in unknown else size for i, size in enumerate(model.shape)])  # type: ignore[misc]


def _finite(weight: Tensor) -> Tensor:
    """A weight that torch may multiply by mean and deviation first, without a different result."""
    known = weight.constant
    if known is None:
        return left_where(weight, F.isinf(weight))
    if np.isinf(known.astype(np.float32)).any():
        raise ConversionError("an infinite weight of group norm is not handled")
    return weight


def _group_norm(input: Tensor, groups: int, weight: Any, bias: Any, eps: float) -> Tensor:
    x = wide(input)
    rows = _grouped(x, groups)
    scale, shift = ones([groups], x.dtype), ones([groups], x.dtype, 0.0)
    if is_rounded(eps, x.dtype):
        result = _by_statistics(rows, [2], eps, _along_channels(scale, 3), None)
    else:
        result = F.instance_norm(rows, scale, shift, eps)
    result = _like(result, x)
    if weight is not None:
        result = F.mul(result, _along_channels(_finite(F.cast(weight, x.dtype)), x.ndim))
    if bias is not None:
        result = F.add(result, _along_channels(F.cast(bias, x.dtype), x.ndim))
    return F.cast(result, input.dtype)


@converter(aten.group_norm.default, aten.native_group_norm.default)
def group_norm(
    ctx: Context,
    input: Tensor,
    num_groups: int = 1,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
    N: Any = None,
    C: Any = None,
    HxW: Any = None,
    group: int = 1,
) -> Any:
    """The result; and, of the second operator, mean and reciprocal deviation."""
    groups = max(num_groups, group)

    def statistics() -> list[Tensor]:
        return [F.squeeze(x, [2]) for x in _finite_statistics(_grouped(input, groups), [2], eps)]

    return with_further(ctx, _group_norm(input, groups, weight, bias, eps), statistics)


@converter(aten.instance_norm.default)
def instance_norm(
    ctx: Context,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    if not use_input_stats:
        return _batch(ctx, input, weight, bias, running_mean, running_var, False, eps)[0]
    if running_mean is not None:
        raise ConversionError("use_input_stats=True updates running statistics, which is not handled")
    x = wide(input)
    channels = [x.shape[1]]
    scale = ones(channels, x.dtype) if weight is None else F.cast(weight, x.dtype)
    shift = ones(channels, x.dtype, 0.0) if bias is None else F.cast(bias, x.dtype)
    if is_rounded(eps, x.dtype):
        scale, shift = (_along_channels(value, x.ndim) for value in (scale, shift))
        return _by_statistics(x, list(range(2, x.ndim)), eps, scale, shift)
    return F.cast(F.instance_norm(x, scale, shift, eps), input.dtype)


@converter(aten._native_batch_norm_legit_functional.default)
def native_batch_norm_functional(
    ctx: Context,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    """Batch norm that returns the running statistics it would otherwise have written."""
    if not training:
        result = _batch(ctx, input, weight, bias, running_mean, running_var, False, eps)
        return (*_with_statistics(ctx, result)[:3], F.identity(running_mean), F.identity(running_var))
    result = _batch(ctx, input, weight, bias, None, None, True, eps)
    x = wide(input, halves=True)
    axes = [axis for axis in range(x.ndim) if axis != 1]
    count = np.prod([static(x, axis) for axis in axes])
    centred = F.sub(x, F.reduce_mean(x, axes))
    variance = F.div(F.reduce_sum(F.mul(centred, centred), axes, keepdims=False), float(count - 1))
    after = []
    for before, new in ((running_mean, result[1]), (running_var, variance)):
        old = F.mul(wide(before, halves=True), 1 - momentum)
        after.append(F.cast(F.add(old, F.mul(F.cast(new, old.dtype), momentum)), before.dtype))
    return (*_with_statistics(ctx, result)[:3], *after)


# Normalisation by the root mean square.


def _least(x: Tensor) -> float:
    """The default epsilon: the rounding of the type it is computed in, float32 for halves."""
    return float(torch.finfo(dtypes.to_torch(x.dtype)).eps)


def _reciprocal(x: Tensor, sizes: Sequence[int], eps: float) -> Tensor:
    """One by the root of the mean square over the last dimensions, which are kept."""
    axes = list(range(x.ndim - len(sizes), x.ndim))
    return F.reciprocal(F.sqrt(F.add(F.reduce_mean(F.mul(x, x), axes), eps)))


@converter(aten.rms_norm.default, aten._fused_rms_norm.default)
def rms_norm(
    ctx: Context,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    """The result; and, of the second operator, the reciprocal root."""
    x = wide(input, halves=True)
    eps = _least(x) if eps is None else eps
    scale = ones(normalized_shape, x.dtype) if weight is None else F.cast(weight, x.dtype)
    if is_rounded(eps, x.dtype):
        result = F.mul(F.mul(x, _reciprocal(x, normalized_shape, eps)), scale)
    else:
        result = F.cast(F.rms_norm(x, scale, axis=-len(normalized_shape), epsilon=eps), input.dtype)
    return with_further(ctx, result, lambda: [_reciprocal(x, normalized_shape, eps)])
