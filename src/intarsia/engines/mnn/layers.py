"""Networks for MNN: which layers it takes, and its own converter."""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import helper, numpy_helper

from intarsia.errors import EngineError
from intarsia.network import Layer, Network
from intarsia.network.serialize import to_proto

# Which layers MNN runs as PyTorch does, and the forms that its converter reads.
#
# The lists hold what was compared with ONNX Runtime, layer by layer (MNN 3.6.1, x86_64). What is left out is
# either refused by the converter, or wrong: a slice by negative steps ends the process, `ReduceL2` ignores
# its axes, `Softplus` is off by 2 % for large numbers, pools ignore dilations, and one-dimensional
# convolutions have results of another rank.


_MOST_DIMS = 6

Condition = Callable[[Layer], str | None]


def refusal(net: Network) -> str | None:
    """Why MNN does not run a network as PyTorch does, in a sentence; None if it does."""
    for tensor in (*net.get_inputs(), *net.get_outputs()):
        if tensor.dtype != ir.DataType.FLOAT:
            return f"{tensor.name} is of {tensor.dtype.name}; MNN is given and asked for FLOAT"
    for layer in net.get_layers():
        reason = _layer_refusal(layer)
        if reason is not None:
            return f"{layer.kind}: {reason}"
    return None


def _layer_refusal(layer: Layer) -> str | None:
    if layer.kind not in CONDITIONS:
        return "not among the layers that were compared with PyTorch"
    for tensor in layer.get_inputs():
        if tensor is None or tensor.constant is not None:
            continue
        if tensor.dtype != ir.DataType.FLOAT:
            return f"it reads {tensor.name}, of {tensor.dtype.name}, at run time"
    for tensor in (*layer.get_inputs(), *layer.get_outputs()):
        if tensor is None:
            continue
        if tensor.ndim > _MOST_DIMS:
            return f"{tensor.name} has {tensor.ndim} dimensions; MNN has {_MOST_DIMS}"
        if 0 in tensor.shape and tensor.constant is None:
            return f"{tensor.name} is empty"
    return CONDITIONS[layer.kind](layer)


def _always(layer: Layer) -> str | None:
    return None


def _constant(*places: int) -> Condition:
    """The inputs at these places must be known when the network is built."""

    def condition(layer: Layer) -> str | None:
        inputs = layer.get_inputs()
        for place in places:
            tensor = inputs[place] if place < len(inputs) else None
            if tensor is not None and tensor.constant is None:
                return f"{tensor.name} is not constant"
        return None

    return condition


def _window(layer: Layer) -> str | None:
    """Convolutions and pools over images."""
    x = layer.get_inputs()[0]
    assert x is not None
    if x.ndim != 4:
        return f"a window over {x.ndim - 2} dimensions is not handled"
    if str(layer.attribute("auto_pad", "NOTSET")) != "NOTSET":
        return f"auto_pad={layer.attribute('auto_pad')} is not handled"
    return None


def _convolution(layer: Layer) -> str | None:
    return _window(layer) or _constant(1, 2)(layer)


def _pool(layer: Layer) -> str | None:
    if any(step != 1 for step in layer.attribute("dilations", None) or ()):
        return f"dilations={layer.attribute('dilations')} are ignored"
    if len(layer.get_outputs()) > 1:
        return "places of the largest elements are not handled"
    return _window(layer)


def _clip(layer: Layer) -> str | None:
    bounds = [None if x is None else x.constant for x in layer.get_inputs()[1:]]
    if len(bounds) == 2 and bounds[0] is not None and bounds[1] is not None and bounds[0] > bounds[1]:
        return f"bounds from {bounds[0]} down to {bounds[1]} are not handled"  # PyTorch takes the upper one
    return _constant(1, 2)(layer)


def _slice(layer: Layer) -> str | None:
    inputs = layer.get_inputs()
    steps = inputs[4].constant if len(inputs) > 4 and inputs[4] is not None else None
    if steps is not None and (steps < 1).any():
        return f"steps={steps.tolist()} are not handled"
    return _constant(1, 2, 3, 4)(layer)


def _one_output(layer: Layer) -> str | None:
    return "only the first output is handled" if len(layer.get_outputs()) > 1 else None


def _statistics(layer: Layer) -> str | None:
    if layer.attribute("training_mode", 0):
        return "training_mode=1 is not handled"
    return _one_output(layer) or _constant(1, 2, 3, 4)(layer)


def _resize(layer: Layer) -> str | None:
    x = layer.get_inputs()[0]
    assert x is not None
    mode, way = layer.attribute("mode", "nearest"), layer.attribute("coordinate_transformation_mode", "")
    if x.ndim != 4 or mode != "linear" or way not in ("half_pixel", "align_corners", "pytorch_half_pixel"):
        return f"mode={mode} by {way or 'half_pixel'} over {x.ndim} dimensions is not handled"
    if layer.attribute("antialias", 0) or layer.attribute("axes", None):
        return "antialias and axes are not handled"
    return _constant(1, 2, 3)(layer)


def _matmul(layer: Layer) -> str | None:
    # A vector ends the process: "double free or corruption".
    ranks = [tensor.ndim for tensor in layer.get_inputs() if tensor is not None]
    return "a vector is not handled" if min(ranks) < 2 else None


def _attention(layer: Layer) -> str | None:
    """What `expanded` writes out: heads apart, no past, as many heads of keys as of queries."""
    inputs = layer.get_inputs()
    q, k = inputs[0], inputs[1]
    assert q is not None and k is not None
    if q.ndim != 4 or q.shape[1] != k.shape[1] or len(layer.get_outputs()) > 1 or len(inputs) > 4:
        return "only plain attention over heads of one number is handled"
    if layer.attribute("is_causal", 0) or layer.attribute("softcap", 0.0):
        return "is_causal and softcap are not handled"
    if len(inputs) > 3 and inputs[3] is not None and inputs[3].dtype != ir.DataType.FLOAT:
        return f"a mask of {inputs[3].dtype.name} is not handled"
    return None if isinstance(q.shape[3], int) else "heads of varying width are not handled"


def _scale(layer: Layer) -> float:
    q = layer.get_inputs()[0]
    assert q is not None
    return float(layer.attribute("scale", None) or 1.0 / math.sqrt(int(q.shape[3] or 1)))


def _kinds(condition: Condition, names: str) -> dict[str, Condition]:
    return dict.fromkeys(names.split(), condition)


CONDITIONS: dict[str, Condition] = {
    **_kinds(_always, "Abs Neg Relu Floor Ceil Sqrt Exp Log Sigmoid Tanh Erf Sin Cos Tan Atan Asin Acos"),
    **_kinds(_always, "Sinh Cosh Asinh Acosh Atanh Reciprocal Softsign HardSigmoid HardSwish LeakyRelu"),
    **_kinds(_always, "Add Sub Mul Div Max Min Sum Softmax LogSoftmax Gemm Gelu Identity Flatten"),
    **_kinds(_always, "Transpose Concat GlobalAveragePool GlobalMaxPool DepthToSpace SpaceToDepth"),
    **_kinds(_constant(1), "Reshape Unsqueeze Squeeze Expand Tile Gather Pow PRelu Split"),
    **_kinds(_constant(1), "ReduceMean ReduceSum ReduceMax ReduceMin"),
    **_kinds(_constant(1, 2, 3), "Pad"),
    **_kinds(_convolution, "Conv ConvTranspose"),
    **_kinds(_pool, "MaxPool AveragePool"),
    **_kinds(_statistics, "BatchNormalization InstanceNormalization"),
    **_kinds(_one_output, "LayerNormalization"),
    "Attention": _attention,
    "Clip": _clip,
    "MatMul": _matmul,
    "Resize": _resize,
    "Slice": _slice,
}


def written_out(net: Network, proto: Any) -> None:
    """Replace the layers that MNN's converter does not read, or shortens, by smaller ones.

    It computes GELU by tanh, off by 2e-4 of the largest result, also where it finds the error function of a
    quotient; it leaves a product alone.
    """
    scales = {
        layer.get_outputs()[0].name: _scale(layer) for layer in net.get_layers() if layer.kind == "Attention"
    }
    nodes: list[Any] = []
    for node in proto.graph.node:
        writer = _Writer(proto.graph, node.output[0])
        if node.op_type == "Gelu":
            attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            _gelu(writer, node, attributes.get("approximate", b"none") == b"tanh")
        elif node.op_type == "Attention":
            _attend(writer, node, scales[node.output[0]])
        else:
            writer.nodes.append(node)
        nodes += writer.nodes
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)


class _Writer:
    """Nodes in place of one, named after its result."""

    def __init__(self, graph: Any, result: str) -> None:
        self._graph, self._result = graph, result
        self.nodes: list[Any] = []

    def add(self, op_type: str, *inputs: str | float, last: bool = False, **attributes: Any) -> str:
        name = self._result if last else f"{self._result}.{len(self.nodes)}"
        operands = [self._constant(x) if isinstance(x, float) else x for x in inputs]
        self.nodes.append(helper.make_node(op_type, operands, [name], **attributes))
        return name

    def _constant(self, number: float) -> str:
        name = f"{self._result}.{len(self.nodes)}.{number!r}"
        self._graph.initializer.append(numpy_helper.from_array(np.asarray(number, np.float32), name))
        return name


def _gelu(writer: _Writer, node: Any, by_tanh: bool) -> None:
    add, x = writer.add, node.input[0]
    if by_tanh:
        cube = add("Mul", add("Mul", x, x), x)
        inner = add("Mul", add("Add", x, add("Mul", cube, 0.044715)), float(np.sqrt(2 / np.pi)))
        gate = add("Tanh", inner)
    else:
        gate = add("Erf", add("Mul", x, float(np.sqrt(0.5))))
    add("Mul", add("Mul", x, 0.5), add("Add", gate, 1.0), last=True)


def _attend(writer: _Writer, node: Any, scale: float) -> None:
    add = writer.add
    q, k, v, *mask = node.input
    scores = add("MatMul", add("Mul", q, scale), add("Transpose", k, perm=[0, 1, 3, 2]))
    if mask and mask[0]:
        scores = add("Add", scores, mask[0])
    add("MatMul", add("Softmax", scores, axis=-1), v, last=True)


# A network in MNN's own form, made by MNN's converter in a process of its own.


# `MNN.tools`, the documented wrapper of the converter, installs a package when it is imported and reports
# each conversion to a server (MNN 3.6). The library below it, `_tools`, does neither. It prints, and it
# ends the process where a check of its own fails, so it runs in a process of its own.
_CODE = "import sys, _tools; sys.exit(0 if _tools.mnnconvert(sys.argv) else 3)"
_MOST_BYTES = 2**31 - 1  # of a protobuf


def converted(net: Network, timeout_s: float = 600.0) -> bytes:
    """The network as MNN's file holds it; EngineError with what the converter printed where it fails."""
    proto, _weights = to_proto(net, weights_outside=False)
    written_out(net, proto)
    if proto.ByteSize() > _MOST_BYTES:
        raise EngineError(f"the network has {proto.ByteSize()} bytes; MNN's converter reads {_MOST_BYTES}")
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "model.onnx"), Path(folder, "model.mnn")
        source.write_bytes(proto.SerializeToString())
        files = ["--modelFile", str(source), "--MNNModel", str(target)]
        output = _run(["mnnconvert", "-f", "ONNX", "--bizCode", "intarsia", *files], timeout_s)
        if not target.exists() or not target.stat().st_size:
            raise EngineError(f"MNN's converter refuses {net.name}: {_reason(output)}")
        return target.read_bytes()


def _run(arguments: Sequence[str], timeout_s: float) -> str:
    """What the converter prints."""
    command = [sys.executable, "-P", "-c", _CODE, *arguments[1:]]
    try:
        run = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {timeout_s:.0f} s"
    text = run.stdout.decode(errors="replace")
    return text if run.returncode >= 0 else f"{text}\nit ended with signal {-run.returncode}"


def _reason(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if "rror" in line or "ot support" in line or "signal" in line]
    return (telling or lines or ["it wrote no file"])[-1]
