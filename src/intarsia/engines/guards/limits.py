"""What an engine says of its kernels: the values they treat as PyTorch does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from intarsia.engines.guards.intervals import Interval
from intarsia.engines.guards.kinds import AnyGuard
from intarsia.network import Layer

FINITE = Interval(-(2.0**100), 2.0**100)


def of_rounded_product(layer: Layer, index: int) -> Interval | None:
    """What can be rounded to integers: by `QuantizeLinear`, or by a kernel whose weight is constant.

    A row is scaled by its largest magnitude: of NaN and infinities nothing sensible is left.
    """
    if layer.kind == "QuantizeLinear" and index == 0:
        return FINITE  # which integer NaN becomes differs
    if layer.kind not in ("MatMul", "Gemm") or index != 0:
        return None
    weight = layer.get_inputs(1)[0]
    return FINITE if weight is not None and weight.value.const_value is not None else None


class Limits(Protocol):
    """An engine's own; what it does not speak of, it computes rightly."""

    engine: str
    by_reciprocals: bool  # divides by multiplying, so that a denormal divisor overflows

    def floats(self, layer: Layer, index: int) -> Interval | None:
        """Which floats a layer can be given at an input; None for any."""

    def integers(self, layer: Layer) -> Interval | None:
        """Which integers a layer computes rightly; None for all of them."""

    def index_axes(self, layer: Layer) -> Sequence[int] | None:
        """The axes that a layer's indices point into, where its kernel does not check them."""

    def others(self, layer: Layer) -> Sequence[AnyGuard]:
        """What else must hold for a layer of floats."""
