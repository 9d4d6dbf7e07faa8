"""ONNX Runtime: sessions over shared weights, inputs and outputs bound where torch has them."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

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
from intarsia.engines.building import shared_weights
from intarsia.engines.guards.kinds import Checks
from intarsia.engines.onnxruntime.cuda import CudaSession, missing_provider, providers
from intarsia.engines.onnxruntime.session import (
    OnnxFile,
    named_weights,
    names_files,
    session_program,
    weight_value,
    without_weights,
)
from intarsia.engines.ports import Ports
from intarsia.errors import EngineError, first_line
from intarsia.memory import release_mapped

if TYPE_CHECKING:
    import torch

    from intarsia.engines.onnxruntime.model import Model
    from intarsia.engines.onnxruntime.nbits import Values
    from intarsia.network import Network


# What reads networks (`onnxruntime.model`) is imported where one is read: loading a packed one does without.

# ONNX Runtime's rewrites that move a number into an attribute, where it has 32 bits.
_ROUNDING = (
    "MatMulScaleFusion",
    "LayerNormFusionL1",
    "LayerNormFusionL2",
    "SimplifiedLayerNormFusion",
    "FastGeluFusion",
    "QuickGeluFusion",
)

_PACKED = b"MatMulNBits"  # as a model's file names products whose weights have few bits

# Given no rows or no steps, they divide by zero in a thread of their own, which ends the process (1.31.1).
_ENDS_PROCESS_IF_EMPTY = frozenset({"GRU", "LSTM"})


@dataclass(frozen=True)
class OnnxRuntime(NetworkEngine):
    """Runs layer networks on ONNX Runtime.

    Args:
        threads: by default, `torch.get_num_threads()`.
        spinning: threads spin during a run and sleep between runs, so that the next engine has the cores. Use
            False if several calls run at once; a search for throughput sets it.
        prepack: pack weights for faster products. This needs one copy of each weight.
        device: `"cpu"` or `"cuda"`. On a GPU, weights, inputs and results stay there.
        options: entries of the session's configuration.
        guards: watch for values that ONNX Runtime treats differently from PyTorch (NaN, infinities, indices),
            and leave such a call to PyTorch.
        tensorrt: try ONNX Runtime's TensorRT provider first. This has not been tested.

    >>> from intarsia.engines import OnnxRuntime
    >>> OnnxRuntime(threads=1).name
    'onnxruntime'
    """

    threads: int | None = None
    spinning: bool | None = None  # None: unless plans are measured for throughput
    prepack: bool = True  # faster products, for one packed copy of each weight
    device: str = "cpu"
    options: Mapping[str, str] = field(default_factory=dict)  # session configuration entries
    guards: bool = True
    tensorrt: bool = False
    name: ClassVar[str] = "onnxruntime"
    libraries: ClassVar[tuple[str, ...]] = ("onnxruntime",)
    file_suffix: ClassVar[str] = ".onnx"
    rounds_before_packed: ClassVar[bool] = False  # activations, where weights came in few bits

    @property
    def capturable(self) -> bool:  # type: ignore[override]
        return self.device == "cuda" and not self.tensorrt

    @property
    def multiplies_integers(self) -> bool:  # type: ignore[override]
        return self.device == "cpu"

    @property
    def takes_bodies(self) -> bool:  # type: ignore[override]
        return self.device == "cpu"

    def runs_on(self, device: str) -> bool:
        return device == self.device

    def unavailable(self) -> str | None:
        try:
            ort = _import()
        except ImportError:
            return "onnxruntime is not installed; pip install 'intarsia[onnxruntime]'"
        return missing_provider(self.device, self.tensorrt, ort.get_available_providers())

    def for_objective(self, objective: str) -> Engine:
        # Threads that spin stand in the way of other calls.
        if objective == "throughput" and self.spinning is None:
            return replace(self, spinning=False)
        return self

    def variants(self, workload: Workload) -> list[tuple[str, Engine]]:
        if self.device != "cpu":
            return []
        threads = thread_count(None)
        variants: list[tuple[str, Engine]] = []
        if workload.objective == "latency":
            # It pays where other programs want the cores, too, which is not the common case.
            if self.spinning is None and workload.thorough:
                variants.append(("not spinning", replace(self, spinning=False)))
            if self.threads is None and threads > 2:
                variants.append((f"{threads // 2} threads", replace(self, threads=threads // 2)))
        elif self.threads is None and threads > 1:
            variants.append(("1 thread a call", replace(self, threads=1)))
        return variants

    def patterns(self) -> Collection[str]:
        return ("onnx", "com.microsoft")

    def fails_on_empty(self, net: Network) -> str | None:
        kinds = {layer.kind for layer in net.get_layers()} & _ENDS_PROCESS_IF_EMPTY
        return f"{min(kinds)} without elements ends the process in ONNX Runtime" if kinds else None

    def probe(self, net: Network) -> str | None:
        from intarsia.engines.onnxruntime.model import check_bodies, is_static, plain

        try:
            check_bodies(net, self.guards, self.device)
            model = plain(net)
            shared = {name: value for name, (value, _) in {**model.weights, **model.on_gpu}.items()}
            self._session(model.data, model.weights, shared, static=is_static(net), optimize=False)
        except Exception as error:
            return f"ONNX Runtime refuses it: {first_line(error)}"
        return None

    def build(self, net: Network) -> Program:
        from intarsia.engines.onnxruntime.model import has_float64, is_static
        from intarsia.engines.onnxruntime.nbits import with_halved_bytes, with_unsigned_weights

        try:
            if self.device == "cpu" and not self.rounds_before_packed:
                net = with_halved_bytes(net)
            net = with_unsigned_weights(net)
            model = self._guarded(net)
            remaining, folder = self._mapped(model.proto, model.weights)
            model = replace(model, weights=remaining)
            shared = {name: model.weights[name][0] for name in self._shared(net, model.weights)}
            shared |= {name: value for name, (value, _) in model.on_gpu.items()}
            session = self._session(
                model.data,
                model.weights,
                shared,
                static=is_static(net),
                folder=folder,
                float64=has_float64(net),
            )
            return self._program(Ports.of(net), session, (model.weights, model.on_gpu), model.checks)
        except Exception as error:
            raise EngineError(f"ONNX Runtime failed to build {net.name}: {first_line(error)}") from error

    def write(self, net: Network, path: Path) -> Mapping[str, str]:
        from intarsia.engines.onnxruntime.model import write_file

        write_file(replace(self, guards=False)._guarded(net), path)
        return {}

    def open(self, path: Path) -> RuntimeFile:
        return OnnxFile(path)

    def pack(self, net: Network, file: GrowingFile) -> Packed | None:
        """The model that a session is made of, guards and all, less its weights.

        An optimized model that ONNX Runtime writes itself does not load faster (see `docs/measurements.md`).
        """
        from intarsia.engines.onnxruntime.model import has_float64
        from intarsia.engines.onnxruntime.nbits import has_products_of_bytes, needs_unsigned_weights

        is_plain = self.device == "cpu" and self.is_exact
        if not is_plain or has_products_of_bytes(net) or needs_unsigned_weights(net):
            return None  # other forms of weights are made again from those of the archive
        model = self._guarded(net)
        metadata = {
            "ports": Ports.of(net).as_json(),
            "checks": model.checks.as_json(),
            "shared": sorted(self._shared(net, model.weights)),
            "float64": has_float64(net),
        }
        data = without_weights(model.proto, model.weights)
        return None if names_files(data) else Packed(data, metadata)

    def unpack(
        self,
        blob: memoryview,
        about: Mapping[str, Any],
        file: WeightFile,
        weights: Mapping[str, torch.Tensor],
    ) -> Program:
        """A session that reads its weights from the file, piece by piece: a kernel that packs one into a
        layout of its own releases the plain one."""
        ports, checks = Ports.from_json(about["ports"]), Checks.from_json(about["checks"])
        folder: str | None
        folder, name = os.path.split(os.path.realpath(file.path))
        if names_files(blob):
            raise EngineError("the packed model refers to other files")
        # What kernels pack for several sessions is read from files of their own.
        shares = shared_weights() is not None and _PACKED in bytes(blob)
        places = {} if shares else file.places
        values = {key: weight_value(weights[key]) for key in weights if key not in places}
        try:
            model = bytes(blob) + named_weights(weights, places, name)
            if shares:
                import onnx

                proto = onnx.load_model_from_string(model)
                values, folder = self._mapped(proto, values)
                model = bytes(proto.SerializeToString())
                release_mapped(weights[key] for key in weights if key not in values)
            shared = {key: values[key][0] for key in about["shared"] if key in values}
            float64 = about.get("float64", False)
            session = self._session(model, values, shared, static=True, folder=folder, float64=float64)
        except Exception as error:
            raise EngineError(f"ONNX Runtime refuses the packed model: {first_line(error)}") from error
        if len(session.get_outputs()) != len(ports.outputs) + bool(checks.computed):
            raise EngineError(f"the packed model has {len(session.get_outputs())} outputs")
        return self._program(ports, session, values, checks)

    def _mapped(self, proto: Any, weights: Values) -> tuple[Values, str | None]:
        """The weights that a model does not read from shared files, and the folder of these."""
        files = shared_weights() if self.device == "cpu" and self.prepack else None
        if files is None or files.problem is not None:
            return weights, None
        from intarsia.engines.onnxruntime.nbits import map_weights

        return map_weights(proto, weights, files), files.folder if files.places else None

    def _guarded(self, net: Network) -> Model:
        from intarsia.engines.onnxruntime.model import guarded

        return guarded(net, self.guards, self.device)

    def _program(self, ports: Ports, session: Any, weights: object, checks: Checks) -> Program:
        if self.device == "cuda":
            return CudaSession(ports, session, weights, checks)
        return session_program(ports, session, weights, checks)

    def _shared(self, net: Network, weights: Collection[str]) -> set[str]:
        """The weights that stay where torch has them.

        Kernels that pack weights into a faster layout do not pack shared ones; those weights are passed once
        and cost a packed copy.
        """
        from intarsia.engines.onnxruntime.model import is_packed

        packed = {name for name in weights if self.prepack and is_packed(net.graph.initializers[name])}
        return set(weights) - packed

    def _session(
        self,
        model: bytes,
        weights: Mapping[str, tuple[Any, object]],
        shared: Mapping[str, Any],
        *,
        static: bool,
        optimize: bool = True,
        folder: str | None = None,
        float64: bool = False,
    ) -> Any:
        """A session over weights; those `given` besides, as values, stay where these are.

        `folder` is where the model finds files that it names. With `float64`, rewrites that would cost digits
        are left out.
        """
        ort = _import()
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = thread_count(self.threads)
        options.inter_op_num_threads = 1
        for key, value in self._entries(static).items():
            options.add_session_config_entry(key, value)
        if folder is not None:
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
        if not optimize:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        if weights:
            options.add_external_initializers(list(weights), [value for value, _ in weights.values()])
        for name, value in shared.items():
            options.add_initializer(name, value)
        return ort.InferenceSession(
            model,
            options,
            providers=providers(self.device, self.tensorrt),
            disabled_optimizers=_ROUNDING if float64 else (),
        )

    def _entries(self, static: bool) -> dict[str, str]:
        """The configuration of a session; the user's options take precedence."""
        entries = {
            "session.intra_op.allow_spinning": "0" if self.spinning is False else "1",
            "session.force_spinning_stop": "1",  # at the end of a run
            "session.disable_prepacking": "0" if self.prepack else "1",
        }
        if self.is_exact:  # weights that came quantised become numbers once, and no integer kernel is used
            entries["session.disable_quant_qdq"] = "1"
        if self.device != "cpu" and static:
            # A layer that the GPU has no kernel for would take its tensors to the CPU and back.
            entries["session.disable_cpu_ep_fallback"] = "1"
        return {**entries, **self.options}


def _import() -> ModuleType:
    import onnxruntime

    return onnxruntime  # type: ignore[no-any-return]
