"""ONNX Runtime with products of 8 or 4 bits, by its own tools, as engines of their own."""

from __future__ import annotations

import importlib.util
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from intarsia.engines.onnxruntime.engine import OnnxRuntime
from intarsia.errors import EngineError

if TYPE_CHECKING:
    from intarsia.engines.onnxruntime.model import Model
    from intarsia.network import Network
    from intarsia.network.serialize import Weights


# ONNX Runtime with products of 8-bit integers, by its own tool: activations are rounded at every call.


_DYNAMIC_PRODUCTS = ["MatMul", "Gemm"]  # dynamic quantization has no quick kernel for convolutions
_LARGEST_FILE = 2**31 - 2**20  # bytes that one ONNX file can hold


@dataclass(frozen=True)
class OnnxRuntimeInt8(OnnxRuntime):
    """Products with constant weights in 8 bits: weights by column, activations by what each call brings.

    Of a model that was quantised beforehand, its own integers and scales.

    >>> OnnxRuntimeInt8().family
    'onnxruntime'
    """

    name: ClassVar[str] = "onnxruntime-int8"
    arithmetic: ClassVar[str] = "int8"
    based_on: ClassVar[str | None] = "onnxruntime"

    @property
    def coarsest(self) -> float:
        return 2.0**-7

    def unavailable(self) -> str | None:
        reason = super().unavailable()
        if reason is not None or self.device == "cpu":
            return reason
        return f"ONNX Runtime has no 8-bit products for {self.device!r}"

    def _guarded(self, net: Network) -> Model:
        from intarsia.engines.onnxruntime.model import guarded
        from intarsia.network.serialize import to_proto

        if net.is_quantized():
            return guarded(net, self.guards, self.device, quantize=to_proto)
        size = sum(v.const_value.nbytes for v in net.graph.initializers.values() if v.const_value is not None)
        if size > _LARGEST_FILE:
            raise EngineError(f"its weights take {size} bytes, and the quantizer reads models of up to 2 GB")
        return guarded(net, self.guards, self.device, quantize=_quantized)


def _quantized(net: Network) -> tuple[Any, Weights]:
    # Not at the top: loading a file must not import ONNX, which takes a second.
    import onnx

    from intarsia.engines.onnxruntime.nbits import saturates, silent_tool
    from intarsia.network.serialize import to_proto

    model, _ = to_proto(net, weights_outside=False)
    del model.graph.value_info[:]  # shapes of weights that the tool turns round
    # The tool recommends a preparation that concerns static quantization.
    with tempfile.TemporaryDirectory() as folder, silent_tool():
        from onnxruntime.quantization import QuantType, quantize_dynamic

        path = Path(folder) / "int8.onnx"
        quantize_dynamic(
            model,
            path,
            op_types_to_quantize=_DYNAMIC_PRODUCTS,
            per_channel=True,
            # Products by int8 saturate on x86 without VNNI, and were off by 0.3 of the largest value.
            weight_type=QuantType.QUInt8 if saturates() else QuantType.QInt8,
            extra_options={"MatMulConstBOnly": True},
        )
        return onnx.load(path), {}


# ONNX Runtime with the weights of products in 8 or 4 bits, by its own tool and kernels (`MatMulNBits`).
#
# ONNX Runtime copies an external initializer unless it is also a shared one, and kernels do not pack shared
# ones. So packed weights are given once (one packed copy, the fast kernel) and all others twice (no copy).


_TOOL = "onnxruntime.quantization.matmul_nbits_quantizer"


class _ShortWeights(OnnxRuntime):
    based_on: ClassVar[str | None] = "onnxruntime"
    rounds_before_packed: ClassVar[bool] = True
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
