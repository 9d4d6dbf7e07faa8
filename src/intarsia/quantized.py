"""Weights in 4 or 8 bits as a graph holds them: the operators that read them, and how their bits lie.

A weight of N rows and K columns is `(integers - zero) * scale`, with a scale and a zero for each block of
consecutive columns of a row:

    weight   uint8, (N, blocks, bytes of a block); in 4 bits even columns are the lower halves of bytes;
             or a float of 8 bits, which has no zero
    scale    (N, blocks), in the dtype in which the model multiplies
    zero     uint8, (N, blocks); None stands for the middle of the range, 8 or 128

Blocks have 16, 32, 64, 128 or 256 columns, as kernels want them, or are rows.

The matchers of `lower/packing.py` and `lower/integer_products.py` put the operators into a graph; converters
take them, PyTorch runs them. They consist of operators of torch, so that compilers see through them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.nn import functional

_AT_A_TIME = 1 << 18  # numbers of a weight, which fit into a cache
_FEWEST_ROWS = 64  # of a part of a weight: a multiple of those in a word


def dequantized(
    weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, bits: int, dtype: torch.dtype
) -> torch.Tensor:
    """The numbers that a weight in few bits stands for, in the order of operations of all quantizers.

    >>> weight, scale = torch.tensor([[[0x98, 0x07]]], dtype=torch.uint8), torch.tensor([[0.5]])
    >>> dequantized(weight, scale, None, 4, torch.float32)
    tensor([[ 0.0000,  0.5000, -0.5000, -4.0000]])
    """
    if weight.is_floating_point():
        return (weight.to(scale.dtype) * scale.unsqueeze(-1)).flatten(-2).to(dtype)
    integers = torch.stack([weight & 15, weight >> 4], -1).flatten(-2) if bits == 4 else weight
    middle = 2 ** (bits - 1) if zero is None else zero.unsqueeze(-1).to(scale.dtype)
    return ((integers.to(scale.dtype) - middle) * scale.unsqueeze(-1)).flatten(-2).to(dtype)


def linear_by_rows(
    x: torch.Tensor,
    weight: Callable[[slice | None], torch.Tensor],
    bias: torch.Tensor | None,
    rows: int,
    columns: int,
) -> torch.Tensor:
    """The product with a large weight that is computed at the call, some rows of it at a time.

    A dense weight of 8 million floats, with what it is computed from, takes 0.1 GB, and blocks of this size
    leave holes in the heap: a run of a decoder of 98 MiB in 4 bits grew by 1.3 times these. Graphs have one
    product.
    """
    step = max(_FEWEST_ROWS, _AT_A_TIME // max(columns, 1) // _FEWEST_ROWS * _FEWEST_ROWS)
    is_traced = torch.compiler.is_compiling() or type(x) not in (torch.Tensor, torch.nn.Parameter)
    if is_traced or rows <= step:
        return functional.linear(x, weight(None), bias)
    parts = [slice(row, min(row + step, rows)) for row in range(0, rows, step)]
    biases = [None if bias is None else bias[part] for part in parts]
    products = (functional.linear(x, weight(part), own) for part, own in zip(parts, biases, strict=True))
    return torch.cat(list(products), -1)


def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bias: torch.Tensor | None,
    bits: int,
) -> torch.Tensor:
    def dense(rows: slice | None) -> torch.Tensor:
        if rows is None:
            return dequantized(weight, scale, zero, bits, x.dtype)
        zeros = None if zero is None else zero[rows]
        return dequantized(weight[rows], scale[rows], zeros, bits, x.dtype)

    columns = weight.shape[1] * weight.shape[2] * (8 // bits)
    return linear_by_rows(x, dense, bias, weight.shape[0], columns)


def _embedding(
    indices: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bits: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    zeros = None if zero is None else torch.embedding(zero, indices)
    rows, scales = torch.embedding(weight.flatten(1), indices), torch.embedding(scale, indices)
    blocks = rows.reshape(*indices.shape, *weight.shape[1:])
    return dequantized(blocks, scales, zeros, bits, dtype)


def _integer_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, low: int, high: int, nan: int | None
) -> torch.Tensor:
    middle = low + 128  # of the integers, so that int8 holds them
    integers = (torch.nan_to_num(x, nan or 0.0).round().clamp(low, high) - middle).to(torch.int8)
    sums = torch._int_mm(integers.reshape(-1, x.shape[-1]), weight.t())
    if middle:
        sums = sums + weight.sum(1, dtype=torch.int32) * middle
    result = sums.to(torch.promote_types(x.dtype, torch.float32))
    # The other way round Inductor takes it for the scale of the activations, and makes NaN (torch 2.13).
    result = result if scale is None else scale * result
    if nan is None:
        result = result.masked_fill(x.isnan().any(-1).reshape(-1, 1), torch.nan)
    return result.reshape(*x.shape[:-1], weight.shape[0])


def magnitudes_of_products(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """The sums that `integer_linear` would make if all its terms were positive."""
    sums = torch.nan_to_num(x).clamp(-128, 128).abs() @ weight.to(x.dtype).abs().t()
    return sums if scale is None else sums * scale.abs()


@functools.cache
def multiplies_integers_exactly() -> bool:
    """Whether PyTorch's products of 8-bit integers do not saturate on this processor.

    Without dot products of 8 bits (VNNI), kernels for x86 add pairs of products in 16 bits.
    """
    x = torch.tensor([127, -128], dtype=torch.int8).repeat_interleave(64).reshape(2, 64)
    return torch.equal(torch._int_mm(x, x.t()), x.int() @ x.int().t())


torch.library.define(
    "intarsia::quantized_linear",
    "(Tensor x, Tensor weight, Tensor scale, Tensor? zero, Tensor? bias, int bits) -> Tensor",
)
torch.library.impl("intarsia::quantized_linear", "CompositeImplicitAutograd", _linear)
torch.library.define(
    "intarsia::quantized_embedding",
    "(Tensor indices, Tensor weight, Tensor scale, Tensor? zero, int bits, ScalarType dtype) -> Tensor",
)
torch.library.impl("intarsia::quantized_embedding", "CompositeImplicitAutograd", _embedding)

# Products of activations in 8 bits: `x` is in steps of their scale, and is rounded to integers from `low` to
# `high`, NaN to `nan`; without that, NaN makes NaN. The weight is int8 of (rows, columns). The sum of their
# products is exact, and is multiplied by `scale`, which has a number for each row.
torch.library.define(
    "intarsia::integer_linear",
    "(Tensor x, Tensor weight, Tensor? scale, int low, int high, int? nan) -> Tensor",
)
torch.library.impl("intarsia::integer_linear", "CompositeImplicitAutograd", _integer_linear)

LINEAR = torch.ops.intarsia.quantized_linear.default
EMBEDDING = torch.ops.intarsia.quantized_embedding.default
INTEGER_LINEAR = torch.ops.intarsia.integer_linear.default


def has_packed_weights(module: fx.GraphModule) -> bool:
    """Whether a graph multiplies by weights in few bits, or looks them up."""
    return any(node.target in (LINEAR, EMBEDDING) for node in module.graph.nodes)


def is_integer_product(node: fx.Node) -> bool:
    """Whether a node multiplies activations in 8 bits."""
    return node.target is INTEGER_LINEAR


def bits_of(node: fx.Node) -> int | None:
    """The bits of the weight that a node reads; None for one that reads no weight in few bits."""
    if node.target not in (LINEAR, EMBEDDING):
        return None
    bits: Any = node.args[5 if node.target is LINEAR else 4]
    return int(bits)
