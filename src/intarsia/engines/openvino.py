"""OpenVINO on the CPU: compiled models over shared weights, tensors passed where torch has them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import onnx_ir as ir
import torch

from intarsia.engines.base import GuardedProgram, NetworkEngine, Program
from intarsia.engines.openvino_checks import Checked, add_checks, broken, correct
from intarsia.engines.openvino_guards import LONGEST_INPUT, Guards, plan_guards
from intarsia.engines.openvino_limits import refuses
from intarsia.engines.threads import thread_count
from intarsia.errors import EngineError
from intarsia.network import Network, dtypes
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
                plan_guards(net, floats=False)
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
            checked = add_checks(model, plan_guards(net) if self.guards else Guards())
            config = {
                "INFERENCE_PRECISION_HINT": self.precision,
                "PERFORMANCE_HINT": "LATENCY",
                "NUM_STREAMS": "1",
                "INFERENCE_NUM_THREADS": str(thread_count(self.threads)),
                **self.options,
            }
            return _Compiled(net, _core().compile_model(model, "CPU", config), weights, checked)
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


class _Compiled(GuardedProgram):
    """One compiled model; each thread has an inference request of its own."""

    def __init__(self, net: Network, compiled: Any, weights: object, checked: Checked) -> None:
        import openvino

        self._guards, self._most = checked
        self._names = [t.name for t in net.get_inputs()]
        self._vary = [i for i, t in enumerate(net.get_inputs()) if _static(t.shape) is None]
        self._compiled = compiled
        self._weights = weights  # the model reads them where they lie
        self._tensor = openvino.Tensor
        self._inputs = [dtypes.to_torch(t.dtype) for t in net.get_inputs()]
        # An input that no layer reads is not an input of the model any more.
        ports = {name: port for port, found in enumerate(compiled.inputs) for name in found.names}
        self._ports = [ports.get(t.name) for t in net.get_inputs()]
        self._outputs = [(dtypes.to_torch(t.dtype), _static(t.shape)) for t in net.get_outputs()]
        self._types = {
            dtype: _ov_type(openvino, dtype) for dtype in [*self._inputs, *(d for d, _ in self._outputs)]
        }
        self._requests = threading.local()

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own = self._requests.__dict__
        request = own.get("request")
        if request is None:
            request = own["request"] = self._compiled.create_infer_request()
            if self._guards:
                own["numbers"] = np.zeros(len(self._guards), np.float32)
                request.set_output_tensor(
                    len(self._outputs), self._tensor(own["numbers"], shared_memory=True)
                )
        if self._guards and self._vary and self._too_long(tensors):
            return self._left(tensors, f"a dimension is longer than {LONGEST_INPUT}")
        read: list[torch.Tensor] = []  # the request does not keep alive the memory it reads
        for port, dtype, tensor in zip(self._ports, self._inputs, tensors, strict=True):
            if port is None:
                continue
            if not isinstance(tensor, torch.Tensor):
                tensor = torch.tensor(tensor, dtype=dtype)
            read.append(tensor.contiguous())
            request.set_input_tensor(port, self._share(read[-1]))
        results: list[torch.Tensor | None] = []
        for index, (dtype, shape) in enumerate(self._outputs):
            if shape is None:
                results.append(None)
                continue
            out = torch.empty(shape, dtype=dtype)
            if out.numel():  # nothing is written to an empty one, and a folded one cannot be bound
                request.set_output_tensor(index, self._share(out))
            results.append(out)
        request.infer()
        if self._guards and not (own["numbers"] <= self._most).all():
            return self._left(tensors, self._broken(own["numbers"], tensors))
        for index, (dtype, shape) in enumerate(self._outputs):
            if shape is None:
                results[index] = _copy(request.get_output_tensor(index), dtype)
        return tuple(results)  # type: ignore[arg-type]

    def _too_long(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        return any(max(tensors[i].shape, default=0) > LONGEST_INPUT for i in self._vary)

    def _broken(self, numbers: np.ndarray[Any, Any], tensors: tuple[torch.Tensor, ...]) -> str:
        def values(name: str) -> str | None:
            given = tensors[self._names.index(name)] if name in self._names else None
            if not isinstance(given, torch.Tensor):
                return None if given is None else str(given)
            low, high = torch.aminmax(given) if given.numel() else (0, 0)
            return f"{low:g} to {high:g}" if given.is_floating_point() else f"{int(low)} to {int(high)}"

        return broken(self._guards, numbers, self._most, values)

    def _share(self, tensor: torch.Tensor) -> Any:
        dtype = tensor.dtype
        if dtype == torch.bfloat16:
            raw = tensor.view(torch.int16).numpy()
            return self._tensor(raw, tensor.shape, self._types[dtype])
        return self._tensor(tensor.numpy(), shared_memory=True)


def _shared(openvino: Any, data: np.ndarray[Any, Any], dtype: ir.DataType) -> Any:
    if dtype == ir.DataType.BFLOAT16:
        return openvino.Tensor(data.view(np.uint16), data.shape, openvino.Type.bf16)
    return openvino.Tensor(data, shared_memory=True)


@functools.cache
def _core() -> Any:
    import openvino

    return openvino.Core()


def _static(shape: tuple[Any, ...]) -> tuple[int, ...] | None:
    return shape if all(isinstance(d, int) for d in shape) else None


def _ov_type(openvino: Any, dtype: torch.dtype) -> Any:
    return openvino.Type.bf16 if dtype == torch.bfloat16 else None


def _copy(tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    # The request writes into the same memory at its next call.
    data = tensor.data
    if dtype == torch.bfloat16:
        return torch.from_numpy(data.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(data.copy())


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
