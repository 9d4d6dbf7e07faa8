"""What is left of complex operators where the tensor is real; complex tensors are lowered to pairs before."""

from __future__ import annotations

import math

import torch

from intarsia.convert.context import ConversionContext
from intarsia.convert.registry import converter
from intarsia.network import Tensor, dtypes
from intarsia.network import functional as F

aten = torch.ops.aten


@converter(aten.angle.default)
def angle(ctx: ConversionContext, self: Tensor) -> Tensor:
    """Zero, or half a turn for what is negative; not a number stays so."""
    if self.dtype in dtypes.UNSIGNED or self.dtype == dtypes.DataType.BOOL:
        return F.mul(F.cast(self, ctx.dtype), F.constant(0.0, ctx.dtype))
    if self.dtype in dtypes.FLOATS:
        self = F.cast(self, torch.float32)  # the sign is the same, and engines have the kernels
    half_turn, none = F.constant(math.pi, torch.float32), F.constant(0.0, torch.float32)
    turned = F.where(F.less(self, F.constant(0, self.dtype)), half_turn, none)
    if self.dtype in dtypes.FLOATS:
        turned = F.where(F.op("IsNaN", self), self, turned)
    return F.cast(turned, ctx.dtype)
