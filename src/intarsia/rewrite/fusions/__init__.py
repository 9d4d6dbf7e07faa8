"""The shipped patterns. Each file has one family."""

from __future__ import annotations

from intarsia.rewrite.fusions import activation, attention, cleanup, layout, norm, products, rotary
from intarsia.rewrite.fusions.fusion import Fusion as Fusion
from intarsia.rewrite.fusions.fusion import NetworkBuilder as NetworkBuilder

_FAMILIES = (cleanup, layout, attention, rotary, norm, activation, products)

FUSIONS: dict[str, Fusion] = {fusion.name: fusion for family in _FAMILIES for fusion in family.FUSIONS}
