"""ONNX Runtime: sessions over shared weights, inputs and outputs bound where torch has them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
import torch
import torch.utils.dlpack

from intarsia.engines.base import NetworkEngine, Program
from intarsia.engines.threads import thread_count
from intarsia.errors import EngineError
from intarsia.network import Network, dtypes
from intarsia.network.serialize import to_proto

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


@dataclass(frozen=True)
class OnnxRuntime(NetworkEngine):
    """Options: `threads` (torch's count by default), `spinning` threads, `prepack` weights, `device`.

    >>> from intarsia.engines import OnnxRuntime
    >>> OnnxRuntime(threads=1).name
    'onnxruntime'
    """

    threads: int | None = None
    spinning: bool = False  # a spinning thread takes the core the next engine needs
    prepack: bool = True  # faster products, for one packed copy of each weight
    device: str = "cpu"
    options: Mapping[str, str] = field(default_factory=dict)  # session configuration entries
    name: ClassVar[str] = "onnxruntime"

    def runs_on(self, device: str) -> bool:
        return device == self.device

    def unavailable(self) -> str | None:
        try:
            ort = _import()
        except ImportError:
            return "onnxruntime is not installed; pip install 'intarsia[onnxruntime]'"
        wanted = _PROVIDERS.get(self.device)
        if wanted not in ort.get_available_providers():
            return f"this onnxruntime has no provider for {self.device!r}"
        return None

    def probe(self, net: Network) -> str | None:
        try:
            self._session(net, optimize=False)
        except Exception as error:
            return f"ONNX Runtime refuses it: {_first_line(error)}"
        return None

    def build(self, net: Network) -> Program:
        try:
            return _Session(net, *self._session(net, optimize=True), self.device)
        except Exception as error:
            raise EngineError(f"ONNX Runtime failed to build {net.name}: {_first_line(error)}") from error

    def _session(self, net: Network, optimize: bool) -> tuple[Any, object]:
        ort = _import()
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = thread_count(self.threads)
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if self.spinning else "0")
        options.add_session_config_entry("session.disable_prepacking", "0" if self.prepack else "1")
        for key, value in self.options.items():
            options.add_session_config_entry(key, value)
        if not optimize:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        model, weights = to_proto(net)
        shared = {name: _ort_value(ort, array) for name, array in weights.items()}
        if shared:
            options.add_external_initializers(list(shared), [value for value, _ in shared.values()])
        # A weight named twice stays where torch has it. Kernels that pack their weights into a faster
        # layout do not pack such ones, so those are given once and cost a packed copy.
        for name, (value, _) in shared.items():
            if not (self.prepack and _is_packed(net.graph.initializers[name])):
                options.add_initializer(name, value)
        session = ort.InferenceSession(
            model.SerializeToString(), options, providers=[_PROVIDERS[self.device]]
        )
        return session, shared


class _Session:
    """One session; each thread has a binding of its own, bound anew at every call."""

    def __init__(self, net: Network, session: Any, weights: object, device: str) -> None:
        self._session = session
        self._weights = weights  # the session reads them where they lie
        self._device = device
        self._bindings = threading.local()
        self._inputs = [(t.name, _element_type(t.dtype), dtypes.to_torch(t.dtype)) for t in net.get_inputs()]
        self._outputs = [
            (t.name, _element_type(t.dtype), dtypes.to_torch(t.dtype), _static(t.shape))
            for t in net.get_outputs()
        ]
        self._some_unknown = any(shape is None for *_, shape in self._outputs)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        binding = self._bindings.__dict__.get("binding")
        if binding is None:
            binding = self._bindings.binding = self._session.io_binding()
        device = self._device
        kept = []  # copies made here must outlive the run
        for (name, element, dtype), tensor in zip(self._inputs, tensors, strict=True):
            if not isinstance(tensor, torch.Tensor):
                tensor = torch.tensor(tensor, dtype=dtype)
            if not tensor.is_contiguous():
                tensor = tensor.contiguous()
            kept.append(tensor)
            binding.bind_input(name, device, 0, element, tensor.shape, tensor.data_ptr())
        results: list[torch.Tensor | None] = []
        for name, element, dtype, shape in self._outputs:
            if shape is None:
                binding.bind_output(name, device)
                results.append(None)
                continue
            out = torch.empty(shape, dtype=dtype, device=device)
            if out.numel():
                binding.bind_output(name, device, 0, element, shape, out.data_ptr())
            else:  # an empty tensor has no address, and ONNX Runtime wants one
                binding.bind_output(name, device)
            results.append(out)
        self._session.run_with_iobinding(binding)
        if self._some_unknown:
            made = binding.get_outputs()
            results = [_to_torch(made[i]) if out is None else out for i, out in enumerate(results)]
        return tuple(results)  # type: ignore[arg-type]


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


def _static(shape: tuple[Any, ...]) -> tuple[int, ...] | None:
    return shape if all(isinstance(d, int) for d in shape) else None


def _element_type(dtype: ir.DataType) -> Any:
    # numpy has no bfloat16 or float8; ONNX Runtime takes ONNX's own number for those.
    plain = dtype in (dtypes.FLOATS - {ir.DataType.BFLOAT16}) | dtypes.INTEGERS | {ir.DataType.BOOL}
    return dtypes.to_numpy(dtype).type if plain else int(dtype)


def _ort_value(ort: Any, array: ir.TensorProtocol) -> tuple[Any, object]:
    """A view of a weight for ONNX Runtime, without a copy, and what keeps its memory alive."""
    data = array.numpy()
    if not data.flags.c_contiguous:
        data = np.ascontiguousarray(data)
    if array.dtype in (ir.DataType.BFLOAT16, ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E5M2):
        raw = data.view(np.uint16 if data.itemsize == 2 else np.uint8)
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, int(array.dtype)), raw
    return ort.OrtValue.ortvalue_from_numpy(data), data


def _to_torch(value: Any) -> torch.Tensor:
    if value.data_type() == "tensor(bool)":  # DLPack calls it uint8
        return torch.utils.dlpack.from_dlpack(value._ortvalue.to_dlpack()).view(torch.bool)
    return torch.utils.dlpack.from_dlpack(value._ortvalue.to_dlpack())


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
