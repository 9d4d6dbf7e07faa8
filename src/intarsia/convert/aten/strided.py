"""Memory seen through other strides: as_strided, its scatter, resize."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from intarsia.convert.aten.sizes import Size, arange, int64, reshape, result_shape, sizes, total
from intarsia.convert.aten.transpose import ordered
from intarsia.convert.context import ConversionContext
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor
from intarsia.network import functional as F
from intarsia.network.infer.shapes import product

aten = torch.ops.aten


@converter(aten.as_strided.default, aten.as_strided_copy.default)
def as_strided(
    ctx: ConversionContext,
    self: Tensor,
    size: Sequence[Size],
    stride: Sequence[Size],
    storage_offset: Size | None = None,
) -> Tensor:
    flat, _ = _in_memory_order(ctx, self)
    return F.gather(flat, _strided_places(flat, size, stride, storage_offset), 0)


@converter(aten.as_strided_scatter.default)
def as_strided_scatter(
    ctx: ConversionContext,
    self: Tensor,
    src: Tensor,
    size: Sequence[Size],
    stride: Sequence[Size],
    storage_offset: Size | None = None,
) -> Tensor:
    flat, order = _in_memory_order(ctx, self)
    places = F.reshape(_strided_places(flat, size, stride, storage_offset), [-1])
    written = F.scatter_elements(flat, places, F.reshape(F.cast(src, self.dtype), [-1]), 0)
    back = reshape(written, [sizes(self)[axis] for axis in order])
    return ordered(back, [order.index(axis) for axis in range(self.ndim)])


def _strided_places(
    flat: Tensor, size: Sequence[Size], stride: Sequence[Size], storage_offset: Size | None
) -> Tensor:
    """Which elements of memory a strided view shows."""
    places: Tensor = int64(0 if storage_offset is None else storage_offset)
    for axis, (extent, step) in enumerate(zip(size, stride, strict=True)):
        line = arange(extent, 0, step)
        later = list(range(1, len(size) - axis))
        places = total(F.unsqueeze(line, later) if later else line, places)
    known, held = places.constant, flat.shape[0]
    if known is not None and known.size and isinstance(held, int) and int(known.max()) >= held:
        raise ConversionError(f"a strided view reaches element {int(known.max())} of a tensor of {held}")
    return places


@converter(aten.resize.default)
def resize(ctx: ConversionContext, self: Tensor, size: Sequence[Size]) -> Tensor:
    flat, _ = _in_memory_order(ctx, self)
    have, want = flat.shape[0], product(result_shape(ctx))
    if not isinstance(have, int) or not isinstance(want, int) or want > have:
        raise ConversionError(f"resizing {have} elements to {want}, of unset memory, is not handled")
    return reshape(F.slice(flat, 0, want, axis=0), size, result_shape(ctx))


def _in_memory_order(ctx: ConversionContext, x: Tensor) -> tuple[Tensor, list[int]]:
    """The elements as torch holds them, and the order of `x`'s dimensions there.

    Refused where memory holds more than `x` shows.
    """
    source = None if ctx.node is None else ctx.node.args[0]
    value = source.meta.get("val") if isinstance(source, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor):
        raise ConversionError("as_strided of a tensor whose strides are not known is not handled")
    if value.storage_offset() != 0:
        raise ConversionError(f"as_strided of a view at offset {value.storage_offset()} is not handled")
    order = sorted(range(value.ndim), key=lambda axis: value.stride(axis), reverse=True)
    if not value.permute(order).is_contiguous():
        raise ConversionError(f"as_strided of a tensor with strides {value.stride()} is not handled")
    return F.reshape(ordered(x, order), [-1]), order
