"""OpenVINO on the CPU: compiled models over shared weights, tensors passed where torch has them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from intarsia.cache.machine import thread_count
from intarsia.engines.base import (
    Engine,
    GrowingFile,
    NetworkEngine,
    Packed,
    Program,
    RuntimeFile,
    WeightFile,
    Workload,
)
from intarsia.engines.guards.kinds import Checks
from intarsia.engines.openvino.core import core, last_line, settings
from intarsia.engines.openvino.program import CompiledModel, export, imported
from intarsia.engines.ports import Ports
from intarsia.errors import EngineError

if TYPE_CHECKING:
    import torch

    from intarsia.network import Network

# What reads networks (`openvino.model`) is imported where one is read: loading a packed one does without.

# Layers of varying sizes that do nothing if they are given no elements, and set no shape (2026.4).
_KEEPS_LAST_RESULT = frozenset({"AveragePool", "MaxPool", "Unique"})


@dataclass(frozen=True)
class OpenVINO(NetworkEngine):
    """Runs layer networks on OpenVINO.

    Args:
        precision: the arithmetic that it may use. By default, float32; OpenVINO's own default is fp16 or bf16
            if the processor supports it.
        threads: by default, `torch.get_num_threads()`.
        options: properties of the compiled model.
        guards: watch for values that OpenVINO treats differently from PyTorch (NaN, integers beyond its
            arithmetic, indices out of range), and leave such a call to PyTorch.

    >>> from intarsia.engines import OpenVINO
    >>> OpenVINO(precision="f32").name
    'openvino'
    """

    # OpenVINO would choose fp16 or bf16 by itself where the processor has it.
    precision: Literal["f32", "bf16", "f16"] = "f32"
    threads: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    guards: bool = True
    name: ClassVar[str] = "openvino"
    libraries: ClassVar[tuple[str, ...]] = ("openvino",)
    # A quarter of random quotients differ in their last bit from IEEE's (2026.4, x86_64).
    divides_exactly: ClassVar[bool] = False
    file_suffix: ClassVar[str] = ".xml"

    @property
    def coarsest(self) -> float:
        return {"f32": 0.0, "f16": 2.0**-10, "bf16": 2.0**-7}[self.precision]

    def unavailable(self) -> str | None:
        try:
            core()
        except ImportError:
            return "openvino is not installed; pip install 'intarsia[openvino]'"
        return None

    def variants(self, workload: Workload) -> list[tuple[str, Engine]]:
        threads = thread_count(None)
        if workload.objective == "throughput" and not self.options:
            streams = {"PERFORMANCE_HINT": "THROUGHPUT", "NUM_STREAMS": str(threads)}
            return [(f"{threads} streams", replace(self, options=streams))]
        if workload.objective == "latency" and self.threads is None and threads > 2:
            return [(f"{threads // 2} threads", replace(self, threads=threads // 2))]
        return []

    def patterns(self) -> Collection[str]:
        # It multiplies by MLAS or by oneDNN, whichever a product's surroundings ask for.
        return ("onnx", "onednn")

    def fails_on_empty(self, net: Network) -> str | None:
        kinds = {layer.kind for layer in net.get_layers()} & _KEEPS_LAST_RESULT
        return f"{min(kinds)} without elements returns the last call's result in OpenVINO" if kinds else None

    def probe(self, net: Network) -> str | None:
        return self.probe_all([net])[0]

    def probe_all(self, nets: Sequence[Network]) -> list[str | None]:
        from intarsia.engines.openvino.model import refusals

        return refusals(nets, self.precision, self.guards)

    def build(self, net: Network) -> Program:
        from intarsia.engines.openvino.halves import compiled

        try:
            model, weights, checks = self._guarded(net)
            result = compiled(model, {**self._config(), **settings(model)})
            return CompiledModel(Ports.of(net), result, weights, checks)
        except Exception as error:
            raise EngineError(f"OpenVINO failed to build {net.name}: {last_line(error)}") from error

    def write(self, net: Network, path: Path) -> Mapping[str, str]:
        import openvino

        try:
            model, _weights, _ = replace(self, guards=False)._guarded(net)
            openvino.save_model(model, path, compress_to_fp16=False)
        except Exception as error:
            raise EngineError(f"OpenVINO failed to write {net.name}: {last_line(error)}") from error
        return {"INFERENCE_PRECISION_HINT": self.precision}

    def open(self, path: Path) -> RuntimeFile:
        from intarsia.engines.openvino.core import OpenvinoFile

        return OpenvinoFile(path)

    def pack(self, net: Network, file: GrowingFile) -> Packed | None:
        from intarsia.engines.openvino.corrections import has_few_bits
        from intarsia.engines.openvino.halves import is_gated

        if self.arithmetic.startswith("int") or has_few_bits(net):
            return None  # 2026.4 exports such weights with the model: they would be in the file twice
        try:
            model, _weights, checks = self._guarded(net)
            if self.precision != "f32" and is_gated(model):
                return None  # its kernel asks for pairs of threads: where it is loaded there may be one
            blob = export(model, {**self._config(), **settings(model)}, file)
        except Exception as error:
            raise EngineError(f"OpenVINO failed to pack {net.name}: {last_line(error)}") from error
        metadata = {"ports": Ports.of(net).as_json(), "checks": None if checks is None else checks.as_json()}
        return None if blob is None else Packed(blob, metadata)

    def unpack(
        self,
        blob: memoryview,
        about: Mapping[str, Any],
        file: WeightFile,
        weights: Mapping[str, torch.Tensor],
    ) -> Program:
        ports = Ports.from_json(about["ports"])
        checks = None if about["checks"] is None else Checks.from_json(about["checks"])
        try:
            result, remaining = imported(blob, self._config(), file.path)
        except Exception as error:
            raise EngineError(f"OpenVINO refuses the packed model: {last_line(error)}") from error
        if len(result.outputs) != len(ports.outputs) + bool(checks and checks.computed):
            raise EngineError(f"the packed model has {len(result.outputs)} outputs")
        return CompiledModel(ports, result, remaining, checks)

    def _guarded(self, net: Network) -> tuple[Any, object, Checks | None]:
        from intarsia.engines.openvino.model import guarded

        return guarded(net, self.guards, float16=self.precision == "f16")

    def _config(self) -> dict[str, Any]:
        return {
            "INFERENCE_PRECISION_HINT": self.precision,
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": "1",
            "INFERENCE_NUM_THREADS": str(thread_count(self.threads)),
            # Of weights in few bits the kernels would round activations to 8 bits, group by group.
            **({"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"} if self.is_exact else {}),
            **self.options,
        }
