"""What an engine says of its kernels, so that guards can be planned."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.engines.guards.intervals import Interval
from intarsia.engines.guards.kinds import AnyGuard
from intarsia.network import Layer

FINITE = Interval(-(2.0**100), 2.0**100)


class Limits:
    """The limits of an engine; it is correct for everything that they do not mention.

    If its products are `rounded`, they round activations to integers: a row is scaled by its largest
    magnitude, so that NaN and infinities make the whole row meaningless.
    """

    engine: str
    by_reciprocals = False  # divides by multiplying, so that a denormal divisor overflows

    def __init__(self, rounded: bool = False) -> None:
        self.rounded = rounded

    def allowed(self, layer: Layer, index: int) -> Interval | None:
        """The floats that a layer accepts at an input; None for any."""
        if self.rounded and index == 0 and _rounds(layer):
            return FINITE
        return self.floats(layer, index)

    def floats(self, layer: Layer, index: int) -> Interval | None:
        """The same for products that do not round."""
        return None

    def integers(self, layer: Layer) -> Interval | None:
        """The integers for which a layer is correct; None for all of them."""
        return None

    def index_axes(self, layer: Layer) -> Sequence[int] | None:
        """The axes that a layer's indices point into, where its kernel does not check them."""
        return None

    def others(self, layer: Layer) -> Sequence[AnyGuard]:
        """Further conditions of a layer of floats."""
        return ()


def _rounds(layer: Layer) -> bool:
    """Whether it rounds its first input to integers: `QuantizeLinear`, or a kernel with a constant weight."""
    if layer.kind in ("QuantizeLinear", "com.microsoft::MatMulNBits"):
        return True
    weight = layer.get_inputs(1)[0] if layer.kind in ("MatMul", "Gemm") else None
    return weight is not None and weight.value.const_value is not None
