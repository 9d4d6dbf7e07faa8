"""Borders put around a tensor, or cut off where the padding is negative."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from intarsia.convert.aten import kernels
from intarsia.convert.aten.sizes import END, Size, size
from intarsia.convert.context import ConversionContext
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor
from intarsia.network import functional as F

aten = torch.ops.aten
Sides = list[tuple[Size, Size]]
_LAYER_MODE = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}


@converter(aten.constant_pad_nd.default)
def constant_pad_nd(ctx: ConversionContext, self: Tensor, pad: Sequence[Size], value: float = 0) -> Tensor:
    return padded(self, pad, "constant", value)


@converter(aten.pad.default)
def pad(
    ctx: ConversionContext,
    self: Tensor,
    pad: Sequence[Size],
    mode: str = "constant",
    value: float | None = None,
) -> Tensor:
    return padded(self, pad, mode, 0 if value is None else value)


@converter(aten._pad_enum.default)
def pad_enum(
    ctx: ConversionContext, self: Tensor, pad: Sequence[Size], mode: int, value: float | None = None
) -> Tensor:
    name = ("constant", "reflect", "replicate", "circular")[mode]
    return padded(self, pad, name, 0 if value is None else value)


@converter(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default)
def reflection_pad(ctx: ConversionContext, self: Tensor, padding: Sequence[Size]) -> Tensor:
    return padded(self, padding, "reflect")


@converter(aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default)
def replication_pad(ctx: ConversionContext, self: Tensor, padding: Sequence[Size]) -> Tensor:
    return padded(self, padding, "replicate")


@converter(aten._pad_circular.default)
def pad_circular(ctx: ConversionContext, self: Tensor, pad: Sequence[Size]) -> Tensor:
    return padded(self, pad, "circular")


def padded(x: Tensor, pad: Sequence[Size], mode: str, value: float = 0) -> Tensor:
    """`x` with borders; torch lists them from the last dimension on: before, after, before, after, ..."""
    sides: Sides = [(0, 0)] * (x.ndim - len(pad) // 2)
    sides += reversed(list(zip(pad[::2], pad[1::2], strict=True)))
    if mode == "circular":
        return _circular(x, sides)
    if mode not in _LAYER_MODE:
        raise ConversionError(f"mode={mode!r} is not handled")
    if mode != "constant" and not all(isinstance(amount, int) for amount in pad):
        raise ConversionError(f"mode={mode!r} by an amount that is not known yet is not handled")
    # What is cut off is cut off at the end: it may still be mirrored to the other side.
    grown = [(_grow(before), _grow(after)) for before, after in sides]
    if any(not isinstance(amount, int) or amount for side in grown for amount in side):
        amounts = [before for before, _ in grown] + [after for _, after in grown]
        x = kernels.pad(
            x, amounts, F.constant(value, x.dtype) if mode == "constant" else None, _LAYER_MODE[mode]
        )
    return _cut(x, sides)


def _grow(amount: Size) -> Size:
    return max(amount, 0) if isinstance(amount, int) else amount


def _cut(x: Tensor, sides: Sequence[tuple[Size, Size]]) -> Tensor:
    for axis, (before, after) in enumerate(sides):
        start = -before if isinstance(before, int) and before < 0 else 0
        end = after if isinstance(after, int) and after < 0 else END
        if start or end != END:
            x = F.slice(x, start, end, axis=axis)
    return x


def _circular(x: Tensor, sides: Sides) -> Tensor:
    for axis, (before, after) in enumerate(sides):
        if not isinstance(before, int) or not isinstance(after, int):
            raise ConversionError("mode='circular' by an amount that is not known yet is not handled")
        x = _cut(x, [(0, 0)] * axis + [(min(before, 0), min(after, 0))])
        parts = [x]
        if before > 0:
            parts.insert(0, F.slice(x, size(x, axis) - before, END, axis=axis))
        if after > 0:
            parts.append(F.slice(x, 0, after, axis=axis))
        x = F.concat(parts, axis) if len(parts) > 1 else x
    return x
