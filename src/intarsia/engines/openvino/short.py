"""OpenVINO in shorter arithmetic, as engines of their own: beside exact OpenVINO in one plan, or by name."""

from __future__ import annotations

import importlib.util
import io
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TextIO

from intarsia.engines.openvino.core import capabilities
from intarsia.engines.openvino.engine import OpenVINO

if TYPE_CHECKING:
    from intarsia.engines.guards.kinds import Checks
    from intarsia.network import Network


# An OpenVINO model with weights of few bits, by nncf, which is silent here and reports to nobody.


_GROUP = 32  # weights of a row that share a scale, in 4 bits
_NO_REPORTS = "NNCF_CI"  # set while nncf is imported, it sends no figures about its use


def compressed(model: Any, bits: int) -> Any:
    """The model, changed in place: constants of products and embeddings in 8 or 4 bits, and their scales."""
    with _silence() as nncf:
        modes = nncf.CompressWeightsMode
        if bits == 8:
            return nncf.compress_weights(model, mode=modes.INT8_ASYM)
        return nncf.compress_weights(model, mode=modes.INT4_ASYM, group_size=_GROUP)


def _nncf() -> ModuleType:
    if "nncf" in sys.modules or _NO_REPORTS in os.environ:
        import nncf

        return nncf  # type: ignore[no-any-return]
    os.environ[_NO_REPORTS] = "1"
    try:
        import nncf

        return nncf  # type: ignore[no-any-return]
    finally:
        del os.environ[_NO_REPORTS]


@contextmanager
def _silence() -> Iterator[ModuleType]:
    """nncf writes its progress to standard output, from its own threads; other threads can still write."""
    others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
    with redirect_stdout(_Filtered(sys.stdout, others)):
        nncf = _nncf()  # first, since it sets the level of its logger
        log = logging.getLogger("nncf")
        before = log.level
        log.setLevel(logging.ERROR)
        try:
            yield nncf
        finally:
            log.setLevel(before)


class _Filtered(io.TextIOBase):
    """Standard output for some threads only."""

    def __init__(self, out: TextIO, heard: set[int | None]) -> None:
        self._out, self._heard = out, heard

    def write(self, text: str) -> int:
        return self._out.write(text) if threading.get_ident() in self._heard else len(text)

    def flush(self) -> None:
        self._out.flush()


# OpenVINO in shorter arithmetic, as engines of their own: beside exact OpenVINO in one plan, or by name.


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
    """Integer kernels for a model that is already quantized; the rest stays exact.

    >>> OpenVINOInt8().family, OpenVINOInt8().quantized_only
    ('openvino', True)
    """

    name: ClassVar[str] = "openvino-int8"
    arithmetic: ClassVar[str] = "int8"
    quantized_only: ClassVar[bool] = True

    @property
    def coarsest(self) -> float:
        return 2.0**-7

    def _guarded(self, net: Network) -> tuple[Any, object, Checks | None]:
        from intarsia.engines.openvino.model import guarded

        return guarded(net, self.guards, rounded=True)


# OpenVINO with weights in 8 or 4 bits, as nncf compresses them: its kernels widen them as they read them.
#
# OpenVINO's ONNX reader copies weights, even from memory addresses. So the model is read with weights as
# inputs, which constants over torch's memory then replace.


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

    def _guarded(self, net: Network) -> tuple[Any, object, Checks | None]:
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
