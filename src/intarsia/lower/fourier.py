"""Fourier transforms as products with constant matrices, on pairs of real tensors.

Engines have no complex type. A transform of a constant length is a linear map, whose cosines and sines are
folded into constants. A long transform is one over the rows and one over the columns of a table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from intarsia.lower.complex import COMPLEX_DECOMPOSITIONS, is_complex, paired, parts

aten = torch.ops.aten
# The largest matrix, in rows and columns, that is folded; longer transforms are split.
LONGEST = 256

Pair = tuple[Tensor, Tensor | None]  # real and imaginary part; None is an imaginary part of zeros


def _waves(rows: int, columns: int, length: int, sign: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of 2 pi j k / length; angles are reduced as integers and computed in double."""
    places = torch.arange(rows, device=like.device)[:, None] * torch.arange(columns, device=like.device)
    angles = places.remainder(length).to(torch.float64) * (2 * math.pi / length)
    return torch.cos(angles).to(like.dtype), (torch.sin(angles) * sign).to(like.dtype)


def _times(pair: Pair, cosine: Tensor, sine: Tensor, product: Any) -> tuple[Tensor, Tensor]:
    """The complex product of a pair with (cosine, sine), by `product` (matmul or mul)."""
    real, imaginary = pair
    if imaginary is None:
        return product(real, cosine), product(real, sine)
    return (
        product(real, cosine) - product(imaginary, sine),
        product(real, sine) + product(imaginary, cosine),
    )


def _split(length: int) -> int | None:
    """The largest divisor of `length` up to its square root; None if that is 1."""
    return next((d for d in range(math.isqrt(length), 1, -1) if length % d == 0), None)


def feasible(length: Any) -> bool:
    """Whether a transform of this length has small matrices: it is constant and has no large prime factor."""
    if not isinstance(length, int) or length < 1:
        return False
    while length > LONGEST:
        divisor = _split(length)
        if divisor is None or not feasible(divisor):
            return False
        length //= divisor
    return True


def _transform(pair: Pair, length: int, sign: float, keep: int | None = None) -> tuple[Tensor, Tensor]:
    """The first `keep` numbers of the transform over the last dimension."""
    keep = length if keep is None else keep
    real, imaginary = pair
    divisor = _split(length)
    if length <= LONGEST or divisor is None:
        return _times(pair, *_waves(length, keep, length, sign, real), torch.matmul)
    # j = a columns + b and k = c + rows d: over a for every b, times e^(b c), then over b.
    rows, columns = divisor, length // divisor
    table = [
        None if x is None else x.reshape(*x.shape[:-1], rows, columns).transpose(-1, -2)
        for x in (real, imaginary)
    ]
    assert table[0] is not None
    inner = _transform((table[0], table[1]), rows, sign)
    rotated = _times(inner, *_waves(columns, rows, length, sign, real), torch.mul)
    outer = _transform((rotated[0].transpose(-1, -2), rotated[1].transpose(-1, -2)), columns, sign)
    flat = [x.transpose(-1, -2).reshape(*x.shape[:-2], length)[..., :keep] for x in outer]
    return flat[0], flat[1]


def _along(pair: Pair, dim: int, sign: float, keep: int | None = None) -> tuple[Tensor, Tensor]:
    """The transform over any dimension."""
    real, imaginary = pair
    length = real.shape[dim]
    if dim % real.ndim == real.ndim - 1:
        return _transform(pair, length, sign, keep)
    moved = real.transpose(dim, -1), None if imaginary is None else imaginary.transpose(dim, -1)
    result = _transform(moved, length, sign, keep)
    return result[0].transpose(dim, -1), result[1].transpose(dim, -1)


def _scaled(pair: tuple[Tensor, Tensor], normalization: int, count: int) -> tuple[Tensor, Tensor]:
    """The sums for 0, divided by the root of the number of summands for 1, or by that number for 2."""
    if normalization == 0:
        return pair
    factor = 1 / (math.sqrt(count) if normalization == 1 else count)
    return pair[0] * factor, pair[1] * factor


def _c2c(self: Tensor, dim: Sequence[int], normalization: int, forward: bool) -> Tensor:
    lengths = [self.shape[d] for d in dim]
    if not all(map(feasible, lengths)):
        return NotImplemented  # type: ignore[no-any-return]
    real, imaginary = parts(self)
    for d in dim:
        real, imaginary = _along((real, imaginary), d, -1.0 if forward else 1.0)
    return paired(*_scaled((real, imaginary), normalization, math.prod(lengths)))


def _r2c(self: Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> Tensor:
    lengths = [self.shape[d] for d in dim]
    if not all(map(feasible, lengths)):
        return NotImplemented  # type: ignore[no-any-return]
    keep = lengths[-1] // 2 + 1 if onesided else None
    result = _along((self, None), dim[-1], -1.0, keep)
    for d in dim[:-1]:
        result = _along(result, d, -1.0)
    return paired(*_scaled(result, normalization, math.prod(lengths)))


def _c2r(self: Tensor, dim: Sequence[int], normalization: int, last_dim_size: Any) -> Tensor:
    lengths = [*(self.shape[d] for d in dim[:-1]), last_dim_size]
    if not all(map(feasible, lengths)):
        return NotImplemented  # type: ignore[no-any-return]
    real, imaginary = parts(self)
    for d in dim[:-1]:
        real, imaginary = _along((real, imaginary), d, 1.0)
    real, imaginary = (x.transpose(dim[-1], -1)[..., : last_dim_size // 2 + 1] for x in (real, imaginary))
    result = _real_part(real, imaginary, last_dim_size).transpose(dim[-1], -1)
    return _scaled((result, result), normalization, math.prod(lengths))[0]


def _real_part(real: Tensor, imaginary: Tensor, length: int) -> Tensor:
    """The sum over a half spectrum and its mirror image; the ends have no mirror image and are real."""
    half = real.shape[-1]
    inner = slice(1, half - 1 if length % 2 == 0 else half)
    if length > LONGEST:
        ends = torch.zeros_like(imaginary[..., :1])
        tail = (ends,) if length % 2 == 0 else ()
        imaginary = torch.cat((ends, imaginary[..., inner], *tail), -1)
        whole = torch.cat((real, real[..., inner].flip(-1)), -1)
        mirrored = torch.cat((imaginary, -imaginary[..., inner].flip(-1)), -1)
        return _transform((whole, mirrored), length, 1.0)[0]
    cosine, sine = _waves(half, length, length, 1.0, real)
    ends = real[..., :1] @ cosine[:1]
    if length % 2 == 0:
        ends = ends + real[..., -1:] @ cosine[-1:]
    if inner.stop - inner.start < 1:
        return ends
    return ends + 2 * (real[..., inner] @ cosine[inner] - imaginary[..., inner] @ sine[inner])


def _real_to_complex(x: Tensor, *, dtype: torch.dtype | None = None, **rest: Any) -> Tensor:
    """A cast between real and complex; other casts are not decomposed here."""
    if dtype is None or is_complex(x) == dtype.is_complex or not (dtype.is_complex or is_complex(x)):
        return NotImplemented  # type: ignore[no-any-return]
    if not dtype.is_complex:
        return parts(x)[0].to(dtype)  # type: ignore[no-any-return]
    real = x.to(dtype.to_real())
    return paired(real, torch.zeros_like(real))


# Every rule for complex tensors.
COMPLEX_AND_FOURIER = {
    **COMPLEX_DECOMPOSITIONS,
    aten._fft_c2c.default: _c2c,
    aten._fft_r2c.default: _r2c,
    aten._fft_c2r.default: _c2r,
    aten._to_copy.default: _real_to_complex,
}
