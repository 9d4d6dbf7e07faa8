"""ONNX Runtime with products of 8-bit integers, by its own tool: activations are rounded at every call."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from intarsia.engines.base import GrowingFile, Packed
from intarsia.engines.onnxruntime.engine import OnnxRuntime
from intarsia.engines.onnxruntime.silent import silent_tool
from intarsia.errors import EngineError

if TYPE_CHECKING:
    from intarsia.engines.onnxruntime.model import Model
    from intarsia.network import Network
    from intarsia.network.serialize import Weights

_PRODUCTS = ["MatMul", "Gemm"]  # dynamic quantization has no quick kernel for convolutions
_LARGEST = 2**31 - 2**20  # bytes that one ONNX file can hold


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

    def pack(self, net: Network, file: GrowingFile) -> Packed | None:
        return None  # it holds its weights, in 8 bits; they are made again from those of the archive

    def _guarded(self, net: Network) -> Model:
        from intarsia.engines.onnxruntime.model import guarded
        from intarsia.engines.quantized import is_quantized, with_quantize_layers
        from intarsia.network.serialize import to_proto

        if is_quantized(net):
            return guarded(with_quantize_layers(net), self.guards, self.device, quantize=to_proto)
        size = sum(v.const_value.nbytes for v in net.graph.initializers.values() if v.const_value is not None)
        if size > _LARGEST:
            raise EngineError(f"its weights take {size} bytes, and the quantizer reads models of up to 2 GB")
        return guarded(net, self.guards, self.device, quantize=_quantized)


def _quantized(net: Network) -> tuple[Any, Weights]:
    import onnx

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
            op_types_to_quantize=_PRODUCTS,
            per_channel=True,
            weight_type=QuantType.QInt8,
            extra_options={"MatMulConstBOnly": True},
        )
        return onnx.load(path), {}
