"""Runs a network on an engine; what the engine cannot take is a refusal with its own words."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from intarsia.errors import EngineError
from intarsia.network import Network, dtypes

Run = Callable[..., tuple[torch.Tensor, ...]]
ENGINES = ("onnxruntime", "openvino")


def build(engine: str, net: Network) -> Run:
    """A program of the network; EngineError if the engine lacks a kernel."""
    return {"onnxruntime": _onnxruntime, "openvino": _openvino}[engine](net)


def _model(net: Network) -> bytes:
    return ir.serde.serialize_model(ir.Model(net.graph, ir_version=10)).SerializeToString()


def _onnxruntime(net: Network) -> Run:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(_model(net), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise EngineError(_short(error)) from error
    inputs = session.get_inputs()
    types = {t.name: t.dtype for t in net.get_inputs()}

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        binding = session.io_binding()
        keep = []
        for argument, tensor in zip(net.get_inputs(), tensors, strict=True):
            if argument.name not in {i.name for i in inputs}:
                continue
            tensor = tensor.detach().contiguous()
            keep.append(tensor)
            binding.bind_input(
                argument.name, "cpu", 0, int(types[argument.name]), tuple(tensor.shape), tensor.data_ptr()
            )
        for output in session.get_outputs():
            binding.bind_output(output.name, "cpu")
        session.run_with_iobinding(binding)
        results = []
        for value, output in zip(binding.get_outputs(), net.get_outputs(), strict=True):
            if output.dtype == ir.DataType.BFLOAT16:
                results.append(torch.from_dlpack(value._ortvalue.to_dlpack()).clone())
            else:
                results.append(torch.from_numpy(np.array(value.numpy())))
        return tuple(results)

    return run


@functools.cache
def _core() -> Any:
    import openvino

    return openvino.Core()


def _openvino(net: Network) -> Run:
    import openvino

    try:
        model = _core().read_model(_model(net))
        hints = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
        compiled = _core().compile_model(model, "CPU", hints)
    except Exception as error:
        raise EngineError(_short(error)) from error
    kinds = {ir.DataType.BFLOAT16: openvino.Type.bf16}

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        request = compiled.create_infer_request()
        for i, (port, tensor) in enumerate(zip(net.get_inputs(), tensors, strict=True)):
            tensor = tensor.detach().contiguous()
            if port.dtype in kinds:
                array = tensor.view(torch.int16).numpy()
                given = openvino.Tensor(array, openvino.Shape(tuple(tensor.shape)), kinds[port.dtype])
            else:
                given = openvino.Tensor(tensor.numpy())
            request.set_input_tensor(i, given)
        request.infer()
        results = []
        for i, output in enumerate(net.get_outputs()):
            data = request.get_output_tensor(i).data
            if output.dtype == ir.DataType.BFLOAT16:
                results.append(torch.from_numpy(np.array(data).view(np.int16)).view(torch.bfloat16))
            else:
                results.append(torch.from_numpy(np.array(data)).to(dtypes.to_torch(output.dtype)))
        return tuple(results)

    return run


def _short(error: Exception) -> str:
    """An engine's error without file positions and stack, so that equal causes read equal."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith(("Exception from src", "Check '"))]
    return (told or lines or [type(error).__name__])[-1][:200]
