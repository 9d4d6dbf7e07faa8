"""A network as the model of a session: guards added, weights as values over torch's memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx import TensorProto

from intarsia.cache.machine import is_arm
from intarsia.engines.guards import appended
from intarsia.engines.guards.appended import AppendedNodes
from intarsia.engines.guards.intervals import Interval
from intarsia.engines.guards.kinds import AnyGuard, Checks, Guards, ValueGuard
from intarsia.engines.guards.limits import FINITE, Limits
from intarsia.engines.guards.planner import LOOKED_AT, plan_guards
from intarsia.engines.onnxruntime.corrections import compute_in_float32, corrected, is_wrong
from intarsia.engines.onnxruntime.nbits import Values, is_half
from intarsia.engines.onnxruntime.session import OUTPUT
from intarsia.errors import EngineError
from intarsia.network import Layer, Network
from intarsia.network.attributes import bodies_of
from intarsia.network.ops import MULTIPLIES_WEIGHTS, NORMALIZES, RECURRENT
from intarsia.network.serialize import Weights, to_proto


@dataclass(frozen=True)
class Model:
    """The parts that a session is created from."""

    proto: Any
    weights: Values
    on_gpu: Values  # those that are there already, to be read where they lie
    checks: Checks

    @property
    def data(self) -> bytes:
        """The model as a file."""
        return bytes(self.proto.SerializeToString(deterministic=True))


def plain(net: Network) -> Model:
    """The unchanged model, for a session that is not run."""
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

    `quantize` makes a model whose products round activations, and lists the weights that it does not hold.
    """
    on_cpu = device == "cpu"
    check_bodies(net, guards, device)
    proto, weights = (quantize or to_proto)(corrected(net) if on_cpu else net)
    limits = OnnxRuntimeLimits(rounded=quantize is not None)
    planned = plan_guards(net, limits) if guards else Guards()
    checks = add_checks(net, proto, planned, look_at_inputs=on_cpu)
    if on_cpu and is_arm():
        compute_in_float32(net, proto)  # last: it renames what others look for
    return Model(proto, _values(weights), _weights_on_gpu(weights), checks)


def check_bodies(net: Network, guards: bool, device: str) -> None:
    """EngineError for a body with layers that ONNX Runtime does not compute as PyTorch does.

    Guards and corrections are of the layers of a network. None is made inside the body of an `If` or `Loop`.
    """
    for body in (Network.of(graph) for layer in net.get_layers() for graph in bodies_of(layer.node)):
        if guards and any(plan_guards(body, OnnxRuntimeLimits()).all()):
            raise EngineError("its body needs guards on values")
        if device == "cpu" and any(is_wrong(layer) or _is_widened(layer) for layer in body.get_layers()):
            raise EngineError("some layers of its body would have to be replaced")
        check_bodies(body, guards, device)


def _is_widened(layer: Layer) -> bool:
    """Whether a layer may be computed in float32 in place of float16."""
    values = [*layer.node.inputs, *layer.node.outputs]
    return is_arm() and any(value is not None and value.dtype == ir.DataType.FLOAT16 for value in values)


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
    """Whether a kernel packs this weight, also after a transpose that is folded."""
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


# Guards of a network on ONNX Runtime: what its kernels cannot stand, and the layers that look at it.

# What ONNX Runtime's kernels (1.31) would answer unlike PyTorch. A layer of its own for each, such as a
# second pooling that looks for NaN, cost every convolutional model; a look at the input costs little.
#
# Norms are watched for numbers beyond 2**50: the squares overflow and leave 0 where torch has NaN, so a model
# that explodes would look alive.


_NUMBERS = Interval(-math.inf, math.inf)
_ABOVE = Interval(-(2.0**100), math.inf)
# Kernels that pass over NaN, or lose it in what they make.
_LOSES_NAN = RECURRENT
# They leave out elements of weight zero, where torch multiplies them: an infinity becomes a NaN.
_LEAVES_OUT = frozenset({"ConvTranspose"})
# On some processors they compare the lower halves of 64-bit integers.
_EXTREMES = frozenset({"ReduceMax", "ReduceMin"})
_LOWER_HALF = Interval(-(2.0**31), 2.0**31 - 1)
# Of what overflows when it is squared they make 0, torch NaN.
_NORMS = NORMALIZES - {"RMSNormalization"}
_SQUARES_FIT = Interval(-(2.0**50), 2.0**50)
# Kinds of attention, and which of their inputs is the mask that is added.
_MASK = {"Attention": 3, "com.microsoft::MultiHeadAttention": 5}
_SMALL = Interval(-(2.0**16), 2.0**16)


class OnnxRuntimeLimits(Limits):
    """Nearly all kernels see all bits of integers here, and check indices."""

    engine = "ONNX Runtime"

    def floats(self, layer: Layer, index: int) -> Interval | None:
        kind = layer.kind
        if kind == "MaxPool" and len(layer.get_outputs()) > 1:
            return FINITE  # a window of minus infinity gives no place
        if kind == "MaxPool":
            return _ABOVE  # of a window of minus infinity it gives the least finite number
        if is_half(layer):  # inf - inf, where the two halves are added
            return FINITE if index == 0 else None
        if kind in _LOSES_NAN:
            return _NUMBERS
        if kind == "QuantizeLinear":  # which integer NaN becomes differs
            return _NUMBERS
        if kind == "GridSample":  # places are kept in 32 bits, and rounded: neighbours must not be far apart
            return _SMALL
        # torch's also skips keys after a query, and NaN in them. After norms, intervals rule all of this out.
        if kind in _MASK:  # torch's kernel leaves a row whose scores are NaN or -inf at 0, this one at NaN
            return Interval(-math.inf, 2.0**100) if index == _MASK[kind] else FINITE
        if (kind in _NORMS and index == 0) or (kind == "com.microsoft::SkipLayerNormalization" and index < 2):
            return _SQUARES_FIT
        if kind in _LEAVES_OUT or (kind == "Resize" and layer.attribute("mode", "nearest") != "nearest"):
            return FINITE if index == 0 else None
        return None

    def integers(self, layer: Layer) -> Interval | None:
        return _LOWER_HALF if layer.kind in _EXTREMES else None


# Guards that are not of inputs: the model computes a number for each, in one more output.


def add_checks(net: Network, model: Any, guards: Guards, *, look_at_inputs: bool) -> Checks:
    """Let the model compute the guards that are not checked before it runs."""
    inputs = {t.name for t in net.get_inputs() if look_at_inputs and t.dtype in LOOKED_AT}
    types = {value.name: value.dtype for value in _all_values(net)}
    return appended.add_checks(model, OUTPUT, guards, inputs, partial(_number, types))


def _all_values(net: Network) -> list[ir.Value]:
    outputs = [value for layer in net.get_layers() for value in layer.node.outputs]
    return [*(tensor.value for tensor in net.get_inputs()), *outputs]


def _number(
    types: Mapping[str | None, ir.DataType | None], nodes: AppendedNodes, guard: AnyGuard
) -> tuple[str, float]:
    """A number, and the most it may be; NaN is more than anything."""
    if not isinstance(guard, ValueGuard):
        raise EngineError(f"a guard that ONNX Runtime has no layers for: {guard}")
    x = guard.tensor
    if types[x] != ir.DataType.FLOAT:
        x = nodes.add("Cast", x, to=TensorProto.FLOAT)
    open_below = guard.low == -math.inf and guard.high != math.inf  # minus infinity is allowed: it masks
    if guard.high == math.inf and guard.low != -math.inf:  # infinity is allowed, minus infinity is not
        x, open_below, guard = nodes.add("Neg", x), True, ValueGuard(x, -math.inf, -guard.low)
    if not open_below and (guard.total or guard.low == -math.inf or guard.high >= 2.0**50):
        return nodes.add("ReduceL1", x, keepdims=0), guard.high
    size = x if open_below else nodes.add("Abs", x)
    inside = nodes.add("LessOrEqual", size, float(guard.high))
    misses = nodes.add("Cast", nodes.add("Not", inside), to=TensorProto.FLOAT)
    return nodes.add("ReduceMax", misses, keepdims=0), 0.5
