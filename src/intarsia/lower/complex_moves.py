"""Complex tensors moved, joined and summed: the same is done to both parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from intarsia.lower.complex import is_complex, join, paired, parts, spells

aten = torch.ops.aten


def _both(x: Tensor) -> tuple[Tensor, Tensor]:
    """Both parts as tensors."""
    return parts(x) if is_complex(x) else (x, torch.zeros_like(x))


def _structural(function: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
    """An operation that only moves elements, done to both parts."""
    real, imaginary = parts(x)
    return paired(function(real, *args), function(imaginary, *args))


@spells(aten.reshape.default, aten.view.default, aten._unsafe_view.default)
def _reshape(x: Tensor, shape: Sequence[Any]) -> Tensor:
    return _structural(torch.reshape, x, shape)


@spells(aten.transpose.int)
def _transpose(x: Tensor, dim0: int, dim1: int) -> Tensor:
    return _structural(torch.transpose, x, dim0, dim1)


@spells(aten.permute.default)
def _permute(x: Tensor, dims: Sequence[int]) -> Tensor:
    return _structural(torch.permute, x, dims)


@spells(aten.expand.default)
def _expand(x: Tensor, size: Sequence[Any], *, implicit: bool = False) -> Tensor:
    return _structural(lambda part: part.expand(*size), x)


@spells(aten.unsqueeze.default)
def _unsqueeze(x: Tensor, dim: int) -> Tensor:
    return _structural(torch.unsqueeze, x, dim)


@spells(aten.squeeze.dim)
def _squeeze(x: Tensor, dim: int) -> Tensor:
    return _structural(torch.squeeze, x, dim)


@spells(aten.select.int)
def _select(x: Tensor, dim: int, index: Any) -> Tensor:
    return _structural(torch.select, x, dim, index)


@spells(aten.slice.Tensor)
def _slice(x: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Tensor:
    return _structural(lambda part: aten.slice.Tensor(part, dim, start, end, step), x)


@spells(aten.cat.default)
def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    both = [_both(t) for t in tensors]
    return paired(torch.cat([r for r, _ in both], dim), torch.cat([i for _, i in both], dim))


@spells(aten.sum.dim_IntList)
def _sum(x: Tensor, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    if dtype is not None:
        return NotImplemented  # type: ignore[no-any-return]
    return _structural(lambda part: torch.sum(part, dim, keepdim), x)


@spells(aten.mean.dim)
def _mean(x: Tensor, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    if dtype is not None:
        return NotImplemented  # type: ignore[no-any-return]
    return _structural(lambda part: torch.mean(part, dim, keepdim), x)


@spells(aten.stack.default)
def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    both = [_both(t) for t in tensors]
    return paired(torch.stack([r for r, _ in both], dim), torch.stack([i for _, i in both], dim))


@spells(aten.squeeze.dims)
def _squeeze_dims(x: Tensor, dim: Sequence[int]) -> Tensor:
    return _structural(torch.squeeze, x, tuple(dim))


@spells(aten.flip.default)
def _flip(x: Tensor, dims: Sequence[int]) -> Tensor:
    return _structural(torch.flip, x, dims)


@spells(aten.roll.default)
def _roll(x: Tensor, shifts: Any, dims: Sequence[int] = ()) -> Tensor:
    return _structural(lambda part: aten.roll.default(part, shifts, dims), x)


@spells(aten.index_select.default)
def _index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    return _structural(torch.index_select, x, dim, index)


@spells(aten.index.Tensor)
def _index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    return _structural(lambda part: aten.index.Tensor(part, indices), x)


@spells(aten.unfold.default)
def _unfold(x: Tensor, dimension: int, size: int, step: int) -> Tensor:
    return _structural(lambda part: part.unfold(dimension, size, step), x)


@spells(aten.constant_pad_nd.default)
def _pad(x: Tensor, pad: Sequence[Any], value: Any = 0) -> Tensor:
    real, imaginary = parts(x)
    whole = complex(value)
    return paired(
        aten.constant_pad_nd.default(real, pad, whole.real),
        aten.constant_pad_nd.default(imaginary, pad, whole.imag),
    )


@spells(aten.where.self)
def _where(condition: Tensor, x: Tensor, other: Tensor) -> Tensor:
    (a, b), (c, d) = _both(x), _both(other)
    return join(torch.where(condition, a, c), torch.where(condition, b, d))
