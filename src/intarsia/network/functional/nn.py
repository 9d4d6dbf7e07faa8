"""Functionals of neural networks: products, convolution, pooling, norms, attention, resize."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from intarsia.network.functional.core import Operand, constant, op, ops
from intarsia.network.network import Tensor
from intarsia.network.signature import record_signature
from intarsia.network.value import MICROSOFT


@record_signature
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product over the last two dimensions, the others broadcast."""
    return op("MatMul", a, b)


@record_signature
def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    trans_a: bool = False,
    trans_b: bool = False,
) -> Tensor:
    """`alpha * a @ b + beta * c` of matrices."""
    return op(
        "Gemm",
        a,
        b,
        c,
        alpha=None if alpha == 1 else float(alpha),
        beta=None if beta == 1 else float(beta),
        transA=1 if trans_a else None,
        transB=1 if trans_b else None,
    )


@record_signature
def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    groups: int = 1,
) -> Tensor:
    """Convolution of (N, C, ...) with a weight (O, C/groups, ...). `pads` has all begins, then all ends."""
    return op(
        "Conv",
        x,
        weight,
        bias,
        kernel_shape=[d for d in weight.shape[2:] if isinstance(d, int)],
        strides=list(strides),
        pads=list(pads),
        dilations=list(dilations),
        group=groups,
    )


@record_signature
def conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    output_padding: Sequence[int],
    groups: int = 1,
) -> Tensor:
    """Transposed convolution with a weight (C, O/groups, ...)."""
    return op(
        "ConvTranspose",
        x,
        weight,
        bias,
        kernel_shape=[d for d in weight.shape[2:] if isinstance(d, int)],
        strides=list(strides),
        pads=list(pads),
        dilations=list(dilations),
        output_padding=list(output_padding),
        group=groups,
    )


@record_signature
def max_pool(
    x: Tensor,
    kernel: Sequence[int],
    *,
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    ceil_mode: bool = False,
    with_indices: bool = False,
) -> tuple[Tensor, ...]:
    """Largest element of each window and, with `with_indices`, its index in the flattened tensor."""
    return ops(
        "MaxPool",
        x,
        outputs=2 if with_indices else 1,
        kernel_shape=list(kernel),
        strides=list(strides),
        pads=list(pads),
        dilations=list(dilations),
        ceil_mode=int(ceil_mode),
    )


@record_signature
def average_pool(
    x: Tensor,
    kernel: Sequence[int],
    *,
    strides: Sequence[int],
    pads: Sequence[int],
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    """Mean of each window."""
    return op(
        "AveragePool",
        x,
        kernel_shape=list(kernel),
        strides=list(strides),
        pads=list(pads),
        ceil_mode=int(ceil_mode),
        count_include_pad=int(count_include_pad),
    )


@record_signature
def batch_norm(
    x: Tensor, scale: Operand, bias: Operand, mean: Operand, var: Operand, epsilon: float
) -> Tensor:
    """Normalize each channel with the given statistics."""
    return op("BatchNormalization", x, scale, bias, mean, var, epsilon=float(epsilon))


@record_signature
def instance_norm(x: Tensor, scale: Operand, bias: Operand, epsilon: float) -> Tensor:
    """Normalize each channel of each sample with its own statistics."""
    return op("InstanceNormalization", x, scale, bias, epsilon=float(epsilon))


@record_signature
def group_norm(x: Tensor, scale: Operand, bias: Operand, groups: int, epsilon: float) -> Tensor:
    """Normalize groups of channels of each sample; scale and bias are per channel."""
    return op("GroupNormalization", x, scale, bias, num_groups=groups, epsilon=float(epsilon))


@record_signature
def layer_norm(
    x: Tensor, scale: Operand, bias: Operand | None, *, axis: int = -1, epsilon: float = 1e-5
) -> Tensor:
    """Normalize over the dimensions from `axis` on."""
    return op("LayerNormalization", x, scale, bias, axis=axis, epsilon=float(epsilon))


@record_signature
def rms_norm(x: Tensor, scale: Operand, *, axis: int = -1, epsilon: float = 1e-5) -> Tensor:
    """Divide by the root mean square over the dimensions from `axis` on, then scale."""
    return op("RMSNormalization", x, scale, axis=axis, epsilon=float(epsilon))


@record_signature
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Scaled dot-product attention over (batch, heads, length, width); fewer heads of k and v are shared."""
    return op("Attention", q, k, v, mask, scale=scale, is_causal=1 if is_causal else None)


@record_signature
def grid_sample(x: Tensor, grid: Tensor, *, mode: str, padding_mode: str, align_corners: bool) -> Tensor:
    """Sample `x` at positions between -1 and 1."""
    return op("GridSample", x, grid, mode=mode, padding_mode=padding_mode, align_corners=int(align_corners))


# Functionals of quantization: integers that stand for multiples of a scale.


_IN_FLOAT32 = 1  # the accuracy level at which activations are not rounded


@record_signature
def quantize_linear(x: Tensor, scale: Tensor, zero_point: Tensor, *, axis: int | None = None) -> Tensor:
    """`round(x / scale) + zero_point`, clamped to the range of the zero point's dtype."""
    return op("QuantizeLinear", x, scale, zero_point, axis=axis)


@record_signature
def dequantize_linear(
    x: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, axis: int | None = None
) -> Tensor:
    """`(x - zero_point) * scale`."""
    return op("DequantizeLinear", x, scale, zero_point, axis=axis)


@record_signature
def matmul_nbits(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    rows: int,
    columns: int,
    bits: int,
    block: int,
) -> Tensor:
    """`x @ w.T + bias`; the weight is bytes of shape (rows, blocks of columns, bytes of a block)."""
    return op(
        "MatMulNBits",
        x,
        weight,
        scale,
        zero_point,
        None,
        bias,
        domain=MICROSOFT,
        K=columns,
        N=rows,
        bits=bits,
        block_size=block,
        accuracy_level=_IN_FLOAT32,
    )


@record_signature
def matmul_integer_to_float(x: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """`(x - zero_point) @ weight * scale` of uint8 by int8 (columns, rows), summed up in integers."""
    one = constant(1.0, ir.DataType.FLOAT)  # the scale of all activations
    return op("MatMulIntegerToFloat", x, weight, one, scale, zero_point, domain=MICROSOFT)
