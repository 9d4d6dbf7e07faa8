"""ONNX Runtime with the weights of products in 8 or 4 bits, by its own tool and kernels (`MatMulNBits`).

ONNX Runtime copies an external initializer unless it is also a shared one, and kernels do not pack shared
ones. So packed weights are given once (one packed copy, the fast kernel) and all others twice (no copy).
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from intarsia.engines.base import GrowingFile, Packed
from intarsia.engines.onnxruntime.engine import OnnxRuntime

if TYPE_CHECKING:
    from intarsia.engines.onnxruntime.model import Model
    from intarsia.network import Network

_TOOL = "onnxruntime.quantization.matmul_nbits_quantizer"


class _ShortWeights(OnnxRuntime):
    based_on: ClassVar[str | None] = "onnxruntime"
    bits: ClassVar[int]
    block: ClassVar[int]  # weights of a column that share a scale

    @property
    def coarsest(self) -> float:
        return 2.0 ** (1 - self.bits)

    def unavailable(self) -> str | None:
        reason = super().unavailable()
        if reason is not None:
            return reason
        if self.device != "cpu":
            return f"weights of {self.bits} bits are tried on the CPU alone, not on {self.device!r}"
        if importlib.util.find_spec(_TOOL) is None:
            return f"this version of ONNX Runtime has no {_TOOL}"
        return None

    def pack(self, net: Network, file: GrowingFile) -> Packed | None:
        return None  # short weights are made again from those of the archive

    def _guarded(self, net: Network) -> Model:
        from intarsia.engines.onnxruntime.model import guarded
        from intarsia.engines.onnxruntime.nbits import with_short_weights

        short = partial(with_short_weights, bits=self.bits, block=self.block)
        return guarded(net, self.guards, self.device, quantize=short)


@dataclass(frozen=True)
class OnnxRuntimeInt8Weights(_ShortWeights):
    """Weights of products in 8 bits, a scale for 128 of a column; activations are rounded at every call.

    >>> OnnxRuntimeInt8Weights().family, OnnxRuntimeInt8Weights().arithmetic
    ('onnxruntime', 'int8-weights')
    """

    name: ClassVar[str] = "onnxruntime-int8-weights"
    arithmetic: ClassVar[str] = "int8-weights"
    bits: ClassVar[int] = 8
    block: ClassVar[int] = 128


@dataclass(frozen=True)
class OnnxRuntimeInt4Weights(_ShortWeights):
    """Weights of products in 4 bits, a scale for 32 of a column; activations are rounded at every call.

    >>> OnnxRuntimeInt4Weights().coarsest
    0.125
    """

    name: ClassVar[str] = "onnxruntime-int4-weights"
    arithmetic: ClassVar[str] = "int4-weights"
    bits: ClassVar[int] = 4
    block: ClassVar[int] = 32
