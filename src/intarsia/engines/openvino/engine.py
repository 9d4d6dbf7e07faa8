"""OpenVINO on the CPU: compiled models over shared weights, tensors passed where torch has them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import onnx_ir as ir

from intarsia.engines.base import NetworkEngine, Program
from intarsia.engines.guards.planner import plan_guards
from intarsia.engines.openvino.checks import add_checks, correct
from intarsia.engines.openvino.limits import OpenVINOLimits, refuses
from intarsia.engines.openvino.program import CompiledModel
from intarsia.engines.threads import thread_count
from intarsia.errors import EngineError
from intarsia.network import Network
from intarsia.network.serialize import to_proto, weights_as_inputs


@dataclass(frozen=True)
class OpenVINO(NetworkEngine):
    """Options: `precision` the arithmetic may use, `threads` (torch's count by default), `options`.

    With `guards` a program watches for values that OpenVINO would treat unlike PyTorch (NaN, integers beyond
    its arithmetic, indices out of range) and leaves such a call to PyTorch; without, it trusts them.

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

    @property
    def coarsest(self) -> float:
        return {"f32": 0.0, "f16": 2.0**-10, "bf16": 2.0**-7}[self.precision]

    def unavailable(self) -> str | None:
        try:
            _core()
        except ImportError:
            return "openvino is not installed; pip install 'intarsia[openvino]'"
        return None

    def probe(self, net: Network) -> str | None:
        try:
            model, _ = self._read(net)
            if self.guards:
                plan_guards(net, OpenVINOLimits(net), floats=False)
            if any(op.get_type_name() == "FrameworkNode" for op in model.get_ops()):
                return "OpenVINO's ONNX reader does not know it"
            supported = _core().query_model(model, "CPU", {"INFERENCE_PRECISION_HINT": self.precision})
            for operation in model.get_ops():
                if operation.get_friendly_name() not in supported:
                    return f"OpenVINO's CPU plugin does not take {operation.get_type_name()}"
        except Exception as error:
            return f"OpenVINO refuses it: {_last_line(error)}"
        return None

    def build(self, net: Network) -> Program:
        try:
            model, weights = self._read(net)
            checks = add_checks(net, model, plan_guards(net, OpenVINOLimits(net))) if self.guards else None
            config = {
                "INFERENCE_PRECISION_HINT": self.precision,
                "PERFORMANCE_HINT": "LATENCY",
                "NUM_STREAMS": "1",
                "INFERENCE_NUM_THREADS": str(thread_count(self.threads)),
                **self.options,
            }
            return CompiledModel(net, _core().compile_model(model, "CPU", config), weights, checks)
        except Exception as error:
            raise EngineError(f"OpenVINO failed to build {net.name}: {_last_line(error)}") from error

    def _read(self, net: Network) -> tuple[Any, object]:
        """The model, its weights put in as constants over torch's own memory; the reader would copy them."""
        import openvino

        reason = refuses(net)
        if reason is not None:
            raise EngineError(reason)
        proto, weights = to_proto(net)
        weights_as_inputs(proto, weights)
        model = _core().read_model(proto.SerializeToString(), b"")
        parameters = {name: p for p in model.get_parameters() for name in p.output(0).get_names()}
        kept = []
        for name, array in weights.items():
            data = np.ascontiguousarray(array.numpy())
            kept.append(data)
            constant = openvino.op.Constant(_shared(openvino, data, array.dtype))
            constant.set_friendly_name(name)
            parameter = parameters[name]
            for reader in parameter.output(0).get_target_inputs():
                reader.replace_source_output(constant.output(0))
            model.remove_parameter(parameter)
        correct(model)
        model.validate_nodes_and_infer_types()
        return model, kept


def _shared(openvino: Any, data: np.ndarray[Any, Any], dtype: ir.DataType) -> Any:
    if dtype == ir.DataType.BFLOAT16:
        return openvino.Tensor(data.view(np.uint16), data.shape, openvino.Type.bf16)
    return openvino.Tensor(data, shared_memory=True)


@functools.cache
def _core() -> Any:
    import openvino

    return openvino.Core()


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
