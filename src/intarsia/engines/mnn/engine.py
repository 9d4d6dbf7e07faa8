"""MNN on the CPU: networks converted in a process of their own, modules cloned for each thread."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from intarsia.cache.machine import is_arm
from intarsia.engines.base import GrowingFile, NetworkEngine, Packed, Program, RuntimeFile, WeightFile
from intarsia.engines.guards.kinds import Checks
from intarsia.engines.mnn.program import CHECKS, MnnProgram, load_module
from intarsia.engines.ports import Ports
from intarsia.errors import EngineError

if TYPE_CHECKING:
    import torch

    from intarsia.network import Network

_MANY = 8  # convolutions; a vision transformer has one


@dataclass(frozen=True)
class MNN(NetworkEngine):
    """Options: `threads` (torch's count by default).

    MNN computes in float32 and in integers of 32 bits. A call with floats that are NaN, infinite or beyond
    2**50, or with integers beyond 32 bits, is PyTorch's.

    >>> from intarsia.engines import MNN
    >>> MNN(threads=1).name
    'mnn'
    """

    threads: int | None = None
    name: ClassVar[str] = "mnn"
    libraries: ClassVar[tuple[str, ...]] = ("MNN",)
    # Of random quotients by 127.5, three quarters differ in their last bit from IEEE's (3.6.1, x86_64).
    divides_exactly: ClassVar[bool] = False
    winograd: ClassVar[int] = 0  # the level of the hint
    precision: ClassVar[str] = "high"

    @classmethod
    def is_default(cls, device: str) -> bool:
        return False  # a search measures it; where the order of engines decides it must be named

    def unavailable(self) -> str | None:
        if find_spec("MNN") is None:
            return "MNN is not installed; pip install 'intarsia[mnn]'"
        return None

    def may_pay(self, model: object) -> bool:
        """On ARM, for models with many convolutions; other engines are as fast for others.

        On a Neoverse N1, as fast as the best other engine: MobileNetV2 1.24 times, BERT and ViT 1.0 or less.
        On x86 it took 1.6 to 2.5 times as long as the best other engine for each of five convolutional models
        with AMX (MobileNetV2 1.6, RegNet 1.7, ConvNeXt 2.1, SegFormer 2.2, ResNet-50 2.5), and 1.7 times with
        AVX2 (MobileNetV2, SegFormer, ResNet-50).
        """
        if not isinstance(model, nn.Module) or not is_arm():
            return False
        return sum(isinstance(module, nn.Conv2d) for module in model.modules()) >= _MANY

    def probe(self, net: Network) -> str | None:
        from intarsia.engines.mnn.layers import refusal

        return refusal(net)

    def build(self, net: Network) -> Program:
        reason = self.probe(net)
        if reason is not None:
            raise EngineError(reason)
        from intarsia.engines.mnn.converter import converted

        model, checks = converted(net)
        return self._program(model, Ports.of(net), checks)

    def open(self, path: Path) -> RuntimeFile:
        from intarsia.engines.mnn.converter import MnnFile

        return MnnFile(path, self.threads)

    def pack(self, net: Network, file: GrowingFile) -> Packed | None:
        """MNN's own file, weights and all: in a layout of its own, so they cannot be shared."""
        from intarsia.engines.mnn.converter import converted

        model, checks = converted(net)
        return Packed(model, {"ports": Ports.of(net).as_json(), "checks": checks.as_json()})

    def unpack(
        self,
        blob: memoryview,
        about: Mapping[str, Any],
        file: WeightFile,
        weights: Mapping[str, torch.Tensor],
    ) -> Program:
        return self._program(bytes(blob), Ports.from_json(about["ports"]), Checks.from_json(about["checks"]))

    def _program(self, model: bytes, ports: Ports, checks: Checks) -> Program:
        outputs = [port.name for port in ports.outputs] + [CHECKS] * bool(checks.computed)
        with tempfile.TemporaryDirectory() as folder:  # MNN reads modules from files alone
            path = Path(folder, "model.mnn")
            path.write_bytes(model)
            module, runtime = load_module(
                path,
                [port.name for port in ports.inputs],
                outputs,
                threads=self.threads,
                precision=self.precision,
                winograd=self.winograd,
            )
        return MnnProgram(ports, module, runtime, checks)


@dataclass(frozen=True)
class MNNFp16(MNN):
    """Winograd's convolutions, whose results are off as those of float16 are; on ARM, float16 besides.

    >>> MNNFp16().family, MNNFp16().coarsest
    ('mnn', 0.0009765625)
    """

    name: ClassVar[str] = "mnn-fp16"
    arithmetic: ClassVar[str] = "fp16"
    based_on: ClassVar[str | None] = "mnn"
    winograd: ClassVar[int] = 3
    precision: ClassVar[str] = "low" if is_arm() else "high"

    @property
    def coarsest(self) -> float:
        return 2.0**-10
