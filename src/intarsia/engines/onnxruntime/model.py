"""A network as the model of a session: guards added, weights as values over torch's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from intarsia.engines.guards.kinds import Checks, Guards
from intarsia.engines.guards.planner import plan_guards
from intarsia.engines.onnxruntime.checks import OnnxRuntimeLimits, RoundedProductLimits, add_checks
from intarsia.engines.onnxruntime.corrections import (
    cast_through_int64,
    compute_in_float32,
    divide_for_reciprocals,
    keep_casts_apart,
    keep_signed_zeros,
)
from intarsia.engines.processor import is_arm
from intarsia.errors import EngineError
from intarsia.network import Network
from intarsia.network.bodies import bodies_of
from intarsia.network.ops import MULTIPLIES_WEIGHTS, RECURRENT
from intarsia.network.serialize import Weights, to_proto

Values = dict[str, tuple[Any, object]]  # weights for a session, each with what keeps its memory alive


@dataclass(frozen=True)
class Model:
    """What a session is made of."""

    proto: Any
    weights: Values
    on_gpu: Values  # those that are there already, to be read where they lie
    checks: Checks

    @property
    def data(self) -> bytes:
        """The model as a file."""
        return bytes(self.proto.SerializeToString(deterministic=True))


def plain(net: Network) -> Model:
    """The model as it is, for a session that is not run."""
    proto, weights = to_proto(net)
    return Model(proto, _values(weights), _weights_on_gpu(weights), Checks())


def guarded(
    net: Network,
    guards: bool,
    device: str,
    *,
    quantize: Callable[[Network], tuple[Any, Weights]] | None = None,
) -> Model:
    """The model to run, its weights, and what must be checked at a call.

    `quantize` makes a model whose products round activations, and tells the weights that it does not hold.
    """
    proto, weights = (quantize or to_proto)(net)
    limits = OnnxRuntimeLimits() if quantize is None else RoundedProductLimits()
    planned = plan_guards(net, limits) if guards else Guards()
    check_bodies(net, guards, device)
    if device == "cpu":
        keep_signed_zeros(net, proto)
        cast_through_int64(net, proto)
        keep_casts_apart(proto.graph)
    checks = add_checks(net, proto, planned, look_at_inputs=device == "cpu")
    if device == "cpu" and is_arm():
        divide_for_reciprocals(net, proto)
        compute_in_float32(net, proto)  # last: it renames what others look for
    return Model(proto, _values(weights), _weights_on_gpu(weights), checks)


def check_bodies(net: Network, guards: bool, device: str) -> None:
    """EngineError for a body with layers that ONNX Runtime does not compute as PyTorch does.

    Guards and corrections are of the layers of a network. None is made inside the body of an `If` or `Loop`.
    """
    for layer in net.get_layers():
        for graph in bodies_of(layer.node):
            body = Network.of(graph)
            if guards and any(plan_guards(body, OnnxRuntimeLimits()).all()):
                raise EngineError("its body needs guards on values")
            as_written = plain(body).data
            if guarded(body, False, device).data != as_written:
                raise EngineError("its body needs other layers in the place of some")


_MOST_INSIDE = 2**31 - 2**26  # protobuf's limit for one message, less what the graph may take


def write_file(model: Model, path: Path) -> None:
    """Write a model with its weights, in a second file beside it where one file may not hold them."""
    import onnx

    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    values = {**model.weights, **model.on_gpu}
    for tensor in proto.graph.initializer:
        if tensor.name in values:
            held = values[tensor.name][1]
            array = held.cpu().numpy() if isinstance(held, torch.Tensor) else held
            del tensor.external_data[:]
            tensor.ClearField("data_location")
            tensor.raw_data = array.tobytes()  # type: ignore[attr-defined]
    is_large = sum(len(tensor.raw_data) for tensor in proto.graph.initializer) > _MOST_INSIDE
    onnx.save_model(proto, path, save_as_external_data=is_large, location=f"{path.name}.data")


_PACKING = MULTIPLIES_WEIGHTS | RECURRENT | {"Attention"}


def is_packed(weight: ir.Value) -> bool:
    """Whether a kernel packs this weight, be it behind a transpose that is folded away."""
    for use in weight.uses():
        if use.node.op_type in _PACKING or use.node.domain:
            return True
        if any(
            is_packed(output) for output in use.node.outputs if use.node.op_type in ("Transpose", "Reshape")
        ):
            return True
    return False


def _values(weights: Weights) -> Values:
    return {name: _value(array) for name, array in weights.items()}


def _value(array: ir.TensorProtocol) -> tuple[Any, object]:
    """A view of a weight for ONNX Runtime, without a copy, and what keeps its memory alive."""
    import onnxruntime as ort

    data = array.numpy()
    if not data.flags.c_contiguous:
        data = np.ascontiguousarray(data)
    if array.dtype in (ir.DataType.BFLOAT16, ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E5M2):
        raw = data.view(np.uint16 if data.itemsize == 2 else np.uint8)
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, int(array.dtype)), raw
    return ort.OrtValue.ortvalue_from_numpy(data), data


def is_static(net: Network) -> bool:
    """Whether every size is a number; those that vary are computed on the CPU, by ONNX Runtime too."""
    tensors = [*net.get_inputs(), *(t for layer in net.get_layers() for t in layer.get_outputs())]
    return all(isinstance(size, int) for tensor in tensors for size in tensor.shape)


def has_float64(net: Network) -> bool:
    """Whether a layer makes float64, whose digits some of ONNX Runtime's own rewrites do not keep."""
    return any(
        tensor.dtype == ir.DataType.DOUBLE for layer in net.get_layers() for tensor in layer.get_outputs()
    )


def _weights_on_gpu(weights: Weights) -> Values:
    """Views of the weights that are on a GPU, for ONNX Runtime to read where they lie."""
    import onnxruntime as ort

    results: Values = {}
    for name, array in weights.items():
        raw = getattr(array, "raw", None)
        if isinstance(raw, torch.Tensor) and raw.is_cuda:
            tensor = raw.detach()
            results[name] = (ort.OrtValue.from_dlpack(tensor), tensor)
    return results
