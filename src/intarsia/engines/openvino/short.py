"""OpenVINO in shorter arithmetic, as engines of their own: beside exact OpenVINO in one plan, or by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from intarsia.engines.base import GrowingFile, Packed
from intarsia.engines.openvino.core import capabilities
from intarsia.engines.openvino.engine import OpenVINO

if TYPE_CHECKING:
    from intarsia.engines.guards.checks import Checks
    from intarsia.network import Network


class _Short(OpenVINO):
    based_on: ClassVar[str | None] = "openvino"

    def unavailable(self) -> str | None:
        reason = super().unavailable()
        if reason is not None:
            return reason
        needed = self.arithmetic.upper()
        return None if needed in capabilities() else f"OpenVINO has no {needed} arithmetic on this processor"


@dataclass(frozen=True)
class OpenVINOBf16(_Short):
    """Products and sums in bfloat16, where the processor has it.

    >>> OpenVINOBf16().family, OpenVINOBf16().coarsest
    ('openvino', 0.0078125)
    """

    precision: Literal["f32", "bf16", "f16"] = "bf16"
    name: ClassVar[str] = "openvino-bf16"
    arithmetic: ClassVar[str] = "bf16"


@dataclass(frozen=True)
class OpenVINOFp16(_Short):
    """Products and sums in float16, where the processor has it.

    >>> OpenVINOFp16().family
    'openvino'
    """

    precision: Literal["f32", "bf16", "f16"] = "f16"
    name: ClassVar[str] = "openvino-fp16"
    arithmetic: ClassVar[str] = "fp16"


@dataclass(frozen=True)
class OpenVINOInt8(_Short):
    """Integer kernels for a model that was quantised beforehand; what is not quantised stays exact.

    >>> OpenVINOInt8().family, OpenVINOInt8().quantized_only
    ('openvino', True)
    """

    name: ClassVar[str] = "openvino-int8"
    arithmetic: ClassVar[str] = "int8"
    quantized_only: ClassVar[bool] = True

    @property
    def coarsest(self) -> float:
        return 2.0**-7

    def pack(self, net: Network, file: GrowingFile) -> Packed | None:
        return None  # it is made again from the weights of the archive

    def _guarded(self, net: Network) -> tuple[Any, object, Checks | None]:
        from intarsia.engines.openvino.model import guarded
        from intarsia.engines.quantized import with_quantize_layers

        return guarded(with_quantize_layers(net), self.guards, rounded=True)
