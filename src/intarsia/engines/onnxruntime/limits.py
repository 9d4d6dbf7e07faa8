"""What ONNX Runtime's kernels would answer unlike PyTorch.

Norms are watched for numbers beyond 2**50: the squares overflow and leave 0 where torch has NaN, so a model
that explodes would look alive.
"""

from __future__ import annotations

import math

from intarsia.engines.guards.intervals import Interval
from intarsia.engines.guards.kinds import AnyGuard
from intarsia.engines.guards.limits import FINITE, of_rounded_product
from intarsia.network import Layer
from intarsia.network.ops import NORMALIZES, RECURRENT

_NUMBERS = Interval(-math.inf, math.inf)
_ABOVE = Interval(-(2.0**100), math.inf)
# Kernels that pass over NaN, or lose it in what they make.
_LOSES_NAN = RECURRENT
# They leave out elements of weight zero, where torch multiplies them: an infinity becomes a NaN.
_LEAVES_OUT = frozenset({"ConvTranspose"})
# On some processors they compare the lower halves of 64-bit integers.
_EXTREMES = frozenset({"ReduceMax", "ReduceMin"})
_LOWER_HALF = Interval(-(2.0**31), 2.0**31 - 1)
# Of what overflows when it is squared they make 0, torch NaN.
_NORMS = NORMALIZES - {"RMSNormalization"}
_SQUARES_FIT = Interval(-(2.0**50), 2.0**50)
# Kinds of attention, and which of their inputs is the mask that is added.
_MASK = {"Attention": 3, "com.microsoft::MultiHeadAttention": 5}
_SMALL = Interval(-(2.0**16), 2.0**16)


class OnnxRuntimeLimits:
    """Nearly all kernels see all bits of integers here, and check indices."""

    engine = "ONNX Runtime"
    by_reciprocals = False

    def floats(self, layer: Layer, index: int) -> Interval | None:
        kind = layer.kind
        if kind == "MaxPool" and len(layer.get_outputs()) > 1:
            return FINITE  # of a window of minus infinity no place is told
        if kind == "MaxPool":
            return _ABOVE  # of a window of minus infinity it gives the least finite number
        if kind in _LOSES_NAN:
            return _NUMBERS
        if kind == "GridSample":  # places are kept in 32 bits, and rounded: neighbours must not be far apart
            return _SMALL
        if kind in _MASK:  # torch's kernel leaves a row whose scores are NaN or -inf at 0, this one at NaN
            return Interval(-math.inf, 2.0**100) if index == _MASK[kind] else FINITE
        if (kind in _NORMS and index == 0) or (kind == "com.microsoft::SkipLayerNormalization" and index < 2):
            return _SQUARES_FIT
        if kind in _LEAVES_OUT or (kind == "Resize" and layer.attribute("mode", "nearest") != "nearest"):
            return FINITE if index == 0 else None
        return None

    def integers(self, layer: Layer) -> Interval | None:
        return _LOWER_HALF if layer.kind in _EXTREMES else None

    def index_axes(self, layer: Layer) -> None:
        return None

    def others(self, layer: Layer) -> list[AnyGuard]:
        return []


class RoundedProductLimits(OnnxRuntimeLimits):
    """Of kernels that round activations to integers, besides."""

    def floats(self, layer: Layer, index: int) -> Interval | None:
        return of_rounded_product(layer, index) or super().floats(layer, index)
