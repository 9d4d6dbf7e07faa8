"""ONNX Runtime: sessions over shared weights, inputs and outputs bound where torch has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from intarsia.engines.base import NetworkEngine, Program
from intarsia.engines.guards.kinds import Guards
from intarsia.engines.guards.planner import plan_guards
from intarsia.engines.onnxruntime.checks import Checks, add_checks
from intarsia.engines.onnxruntime.cuda import CudaSession, is_static, weights_on_gpu
from intarsia.engines.onnxruntime.limits import OnnxRuntimeLimits
from intarsia.engines.onnxruntime.providers import missing_provider, providers
from intarsia.engines.onnxruntime.session import session_program
from intarsia.engines.onnxruntime.signed_zeros import keep_signed_zeros
from intarsia.engines.threads import thread_count
from intarsia.errors import EngineError
from intarsia.network import Network
from intarsia.network.serialize import to_proto


@dataclass(frozen=True)
class OnnxRuntime(NetworkEngine):
    """Options: `threads` (torch's count by default), `spinning` threads, `prepack` weights, `device`.

    On `device="cuda"` weights, inputs and results stay on the GPU, and kernels run in the order of torch's
    stream. `tensorrt` asks ONNX Runtime's TensorRT provider first; that option is untested.

    With `guards` a program watches for values that ONNX Runtime would treat unlike PyTorch (NaN, infinities
    and huge places where kernels mind them) and leaves such a call to PyTorch; without, it trusts them.

    >>> from intarsia.engines import OnnxRuntime
    >>> OnnxRuntime(threads=1).name
    'onnxruntime'
    """

    threads: int | None = None
    spinning: bool = False  # a spinning thread takes the core the next engine needs
    prepack: bool = True  # faster products, for one packed copy of each weight
    device: str = "cpu"
    options: Mapping[str, str] = field(default_factory=dict)  # session configuration entries
    guards: bool = True
    tensorrt: bool = False
    name: ClassVar[str] = "onnxruntime"

    @property
    def capturable(self) -> bool:  # type: ignore[override]
        return self.device == "cuda" and not self.tensorrt

    def runs_on(self, device: str) -> bool:
        return device == self.device

    def unavailable(self) -> str | None:
        try:
            ort = _import()
        except ImportError:
            return "onnxruntime is not installed; pip install 'intarsia[onnxruntime]'"
        return missing_provider(self.device, self.tensorrt, ort.get_available_providers())

    def probe(self, net: Network) -> str | None:
        try:
            self._session(net, optimize=False)
        except Exception as error:
            return f"ONNX Runtime refuses it: {_first_line(error)}"
        return None

    def build(self, net: Network) -> Program:
        try:
            session, weights, checks = self._session(net, optimize=True)
            if self.device == "cuda":
                return CudaSession(net, session, weights, checks)
            return session_program(net, session, weights, checks)
        except Exception as error:
            raise EngineError(f"ONNX Runtime failed to build {net.name}: {_first_line(error)}") from error

    def _session(self, net: Network, optimize: bool) -> tuple[Any, object, Checks]:
        ort = _import()
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = thread_count(self.threads)
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if self.spinning else "0")
        options.add_session_config_entry("session.disable_prepacking", "0" if self.prepack else "1")
        for key, value in self.options.items():
            options.add_session_config_entry(key, value)
        if self.device != "cpu" and is_static(net):
            # A layer that the GPU has no kernel for would take its tensors to the CPU and back.
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        if not optimize:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        model, weights = to_proto(net)
        guards = plan_guards(net, OnnxRuntimeLimits()) if optimize and self.guards else Guards()
        if optimize and self.device == "cpu":
            keep_signed_zeros(net, model)
        checks = add_checks(net, model, guards, look_at_inputs=self.device == "cpu")
        shared = {name: _ort_value(ort, array) for name, array in weights.items()}
        on_gpu = weights_on_gpu(ort, weights)
        if shared:
            options.add_external_initializers(list(shared), [value for value, _ in shared.values()])
        # A weight named twice stays where torch has it. Kernels that pack their weights into a faster
        # layout do not pack such ones, so those are given once and cost a packed copy.
        for name, (value, _) in shared.items():
            if name in on_gpu:
                options.add_initializer(name, on_gpu[name][0])
            elif not (self.prepack and _is_packed(net.graph.initializers[name])):
                options.add_initializer(name, value)
        session = ort.InferenceSession(
            model.SerializeToString(), options, providers=providers(self.device, self.tensorrt)
        )
        return session, (shared, on_gpu), checks


_PACKING = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "LSTM", "GRU", "RNN", "Attention"})


def _is_packed(weight: ir.Value) -> bool:
    """Whether a kernel packs this weight, be it behind a transpose that is folded away."""
    for use in weight.uses():
        if use.node.op_type in _PACKING or use.node.domain:
            return True
        if any(
            _is_packed(output) for output in use.node.outputs if use.node.op_type in ("Transpose", "Reshape")
        ):
            return True
    return False


def _import() -> ModuleType:
    import onnxruntime

    return onnxruntime  # type: ignore[no-any-return]


def _ort_value(ort: Any, array: ir.TensorProtocol) -> tuple[Any, object]:
    """A view of a weight for ONNX Runtime, without a copy, and what keeps its memory alive."""
    data = array.numpy()
    if not data.flags.c_contiguous:
        data = np.ascontiguousarray(data)
    if array.dtype in (ir.DataType.BFLOAT16, ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E5M2):
        raw = data.view(np.uint16 if data.itemsize == 2 else np.uint8)
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, int(array.dtype)), raw
    return ort.OrtValue.ortvalue_from_numpy(data), data


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
