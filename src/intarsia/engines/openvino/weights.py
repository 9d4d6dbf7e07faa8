"""OpenVINO with weights in 8 or 4 bits, as nncf compresses them: its kernels widen them as they read them.

OpenVINO's ONNX reader copies weights, even from memory addresses. So the model is read with weights as
inputs, which constants over torch's memory then replace.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from intarsia.engines.base import GrowingFile, Packed
from intarsia.engines.openvino.engine import OpenVINO

if TYPE_CHECKING:
    from intarsia.engines.guards.checks import Checks
    from intarsia.network import Network


class _ShortWeights(OpenVINO):
    based_on: ClassVar[str | None] = "openvino"
    libraries: ClassVar[tuple[str, ...]] = ("openvino", "nncf")
    bits: ClassVar[int]

    @property
    def coarsest(self) -> float:
        return 2.0 ** (1 - self.bits)

    def unavailable(self) -> str | None:
        reason = super().unavailable()
        if reason is None and importlib.util.find_spec("nncf") is None:
            return "nncf is not installed; pip install 'intarsia[nncf]'"
        return reason

    def pack(self, net: Network, file: GrowingFile) -> Packed | None:
        return None  # short weights are made again from those of the archive

    def _guarded(self, net: Network) -> tuple[Any, object, Checks | None]:
        from intarsia.engines.openvino.compressed import compressed
        from intarsia.engines.openvino.model import guarded

        model, weights, checks = guarded(net, self.guards, rounded=True)
        return compressed(model, self.bits), weights, checks


@dataclass(frozen=True)
class OpenVINOInt8Weights(_ShortWeights):
    """Weights in 8 bits, a scale for each row.

    >>> OpenVINOInt8Weights().family, OpenVINOInt8Weights().arithmetic
    ('openvino', 'int8-weights')
    """

    name: ClassVar[str] = "openvino-int8-weights"
    arithmetic: ClassVar[str] = "int8-weights"
    bits: ClassVar[int] = 8


@dataclass(frozen=True)
class OpenVINOInt4Weights(_ShortWeights):
    """Weights in 4 bits, a scale for 32 of a row; embeddings and the last product, which matter most, in 8.

    >>> OpenVINOInt4Weights().coarsest
    0.125
    """

    name: ClassVar[str] = "openvino-int4-weights"
    arithmetic: ClassVar[str] = "int4-weights"
    bits: ClassVar[int] = 4
