"""The angle of a point: atan2."""

from __future__ import annotations

import math
from typing import Any

import torch

from intarsia.convert.aten.unary import is_negative
from intarsia.convert.context import ConversionContext
from intarsia.convert.promotion import narrowed, promoted_wide
from intarsia.convert.registry import converter
from intarsia.network import Tensor
from intarsia.network import functional as F

aten = torch.ops.aten


@converter(aten.atan2.default, aten.arctan2.default)
def atan2(ctx: ConversionContext, self: Any, other: Any) -> Tensor:
    y, x = promoted_wide(ctx, self, other)
    height, width = F.abs(y), F.abs(x)
    steep = F.greater(height, width)
    # The smaller side over the larger is at most one; both zero means zero, both infinite means one.
    ratio = F.div(F.where(steep, width, height), F.where(steep, height, width))
    ratio = F.where(F.equal(height, width), F.where(F.equal(height, 0.0), height, 1.0), ratio)
    ratio = F.where(F.logical_or(F.isnan(x), F.isnan(y)), math.nan, ratio)
    angle = F.atan(ratio)
    angle = F.where(steep, F.sub(math.pi / 2, angle), angle)
    angle = F.where(is_negative(x), F.sub(math.pi, angle), angle)
    return narrowed(ctx, F.where(is_negative(y), F.neg(angle), angle))
