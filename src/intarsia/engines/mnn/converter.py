"""Networks, and ONNX files of any origin, in MNN's own form: its converter runs in a process of its own."""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import TensorProto, helper

from intarsia.engines.base import Arrays
from intarsia.engines.guards.appended import AppendedNodes
from intarsia.engines.guards.kinds import Checks
from intarsia.engines.mnn.layers import add_checks, planned, spread_choices, spreads_both
from intarsia.engines.mnn.program import array_of, load_module, variable
from intarsia.errors import EngineError
from intarsia.network import Layer, Network
from intarsia.network.ops import COMPARES
from intarsia.network.serialize import to_proto


def written_out(net: Network, proto: Any) -> None:
    """Replace the layers that MNN's converter does not read, or shortens, by smaller ones.

    It computes GELU by tanh, off by 2e-4 of the largest result, also where it finds the error function of a
    quotient; it leaves a product alone.
    """
    layers = {layer.get_outputs()[0].name: layer for layer in net.get_layers()}
    nodes: list[Any] = []
    for node in proto.graph.node:
        writer = AppendedNodes(proto.graph, node.output[0], nodes)
        if node.op_type == "Gelu":
            attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            _gelu(writer, node, attributes.get("approximate", b"none") == b"tanh")
        elif node.op_type == "Attention":
            _attend(writer, node, layers[node.output[0]])
        elif node.op_type == "Cast" and _target(node) == TensorProto.BOOL:
            _truth(writer, layers[node.output[0]])
        elif node.op_type in COMPARES:
            _compare(writer, node, layers[node.output[0]])
        elif node.op_type == "Where":
            _choose(writer, node, layers[node.output[0]])
        elif node.op_type == "Gather":
            _gather(writer, node, layers[node.output[0]])
        else:
            nodes.append(node)
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)


def _target(node: Any) -> int:
    return next(int(attribute.i) for attribute in node.attribute if attribute.name == "to")


def _gelu(writer: AppendedNodes, node: Any, by_tanh: bool) -> None:
    add, x = writer.add, node.input[0]
    if by_tanh:
        cube = add("Mul", add("Mul", x, x), x)
        inner = add("Mul", add("Add", x, add("Mul", cube, 0.044715)), float(np.sqrt(2 / np.pi)))
        gate = add("Tanh", inner)
    else:
        gate = add("Erf", add("Mul", x, float(np.sqrt(0.5))))
    add("Mul", add("Mul", x, 0.5), add("Add", gate, 1.0), last=True)


def _truth(writer: AppendedNodes, layer: Layer) -> None:
    """MNN keeps the numbers that it casts to truth values."""
    x = layer.get_inputs(0)[0]
    assert x is not None
    is_float = x.dtype == ir.DataType.FLOAT
    if is_float:  # Equal compares bits, and those of -0.0 are not those of 0.0
        is_zero = writer.add(
            "And", writer.add("GreaterOrEqual", x.name, 0.0), writer.add("LessOrEqual", x.name, 0.0)
        )
    else:
        is_zero = writer.add("Equal", x.name, 0)
    writer.add("Not", is_zero, last=True)


def _compare(writer: AppendedNodes, node: Any, layer: Layer) -> None:
    """MNN's Less and Equal compare the bits of floats: wrong for two negative ones, and for both zeros."""
    one, other = node.input
    if spreads_both(layer):
        one = writer.add("Expand", one, _sizes(layer))
    x = layer.get_inputs(0)[0]
    assert x is not None
    if node.op_type == "Less":
        writer.add("Greater", other, one, last=True)
    elif node.op_type == "Equal" and x.dtype == ir.DataType.FLOAT:
        least, most = writer.add("GreaterOrEqual", one, other), writer.add("GreaterOrEqual", other, one)
        writer.add("And", least, most, last=True)
    else:
        writer.add(node.op_type, one, other, last=True)


def _choose(writer: AppendedNodes, node: Any, layer: Layer) -> None:
    operands = list(node.input)
    for place in spread_choices(layer):
        operands[place] = writer.add("Expand", operands[place], _sizes(layer))
    writer.add("Where", *operands, last=True)


def _sizes(layer: Layer) -> np.ndarray[Any, Any]:
    return np.array([int(size or 0) for size in layer.get_outputs(0)[0].shape])


def _gather(writer: AppendedNodes, node: Any, layer: Layer) -> None:
    """MNN reads memory at any index, and a guard of a computed index is checked only afterwards."""
    data, indices = layer.get_inputs(0, 1)
    assert data is not None and indices is not None
    axis = layer.attribute("axis", 0)
    name = indices.name
    if indices.constant is None:
        size = int(data.shape[axis] or 0)
        name = writer.add("Min", writer.add("Max", name, -size), size - 1)
    writer.add("Gather", node.input[0], name, axis=axis, last=True)


def _attend(writer: AppendedNodes, node: Any, layer: Layer) -> None:
    add = writer.add
    q, k, v, *mask = node.input
    scores = add("MatMul", add("Mul", q, _scale(layer)), add("Transpose", k, perm=[0, 1, 3, 2]))
    if layer.attribute("is_causal", 0):
        queries, keys = (int(x.shape[2] or 0) for x in layer.get_inputs(0, 1) if x is not None)
        scores = add("Add", scores, np.triu(np.full((queries, keys), -np.inf, np.float32), 1))
    if mask and mask[0]:
        allowed = layer.get_inputs(3)[0]
        assert allowed is not None
        if allowed.dtype == ir.DataType.BOOL:
            scores = add("Where", mask[0], scores, -math.inf)
        else:
            scores = add("Add", scores, mask[0])
    add("MatMul", add("Softmax", scores, axis=-1), v, last=True)


# `MNN.tools`, the documented wrapper of the converter, installs a package when it is imported and reports
# each conversion to a server (MNN 3.6). The library below it, `_tools`, does neither. It prints, and it
# ends the process where a check of its own fails, so it runs in a process of its own.
_CODE = "import sys, _tools; sys.exit(0 if _tools.mnnconvert(sys.argv) else 3)"
_MOST_BYTES = 2**31 - 1  # of a protobuf


def converted(net: Network, timeout_s: float = 600.0) -> tuple[bytes, Checks]:
    """The network as MNN's file holds it, and what must be checked at a call.

    EngineError with the converter's output if it fails.
    """
    proto, _weights = to_proto(net, weights_outside=False)
    written_out(net, proto)
    checks = add_checks(net, proto, planned(net))
    if proto.ByteSize() > _MOST_BYTES:
        raise EngineError(f"the network has {proto.ByteSize()} bytes; MNN's converter reads {_MOST_BYTES}")
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "model.onnx"), Path(folder, "model.mnn")
        source.write_bytes(proto.SerializeToString())
        reason = convert_file(source, target, timeout_s)
        if reason is not None:
            raise EngineError(f"MNN's converter refuses {net.name}: {reason}")
        return target.read_bytes(), checks


def convert_file(source: Path, target: Path, timeout_s: float = 600.0) -> str | None:
    """Write an ONNX file as a file of MNN's; why its converter refuses it, or None."""
    files = ["--modelFile", str(source), "--MNNModel", str(target)]
    output = _run(["mnnconvert", "-f", "ONNX", "--bizCode", "intarsia", *files], timeout_s)
    return None if target.exists() and target.stat().st_size else _reason(output)


def _run(arguments: Sequence[str], timeout_s: float) -> str:
    """The output of the converter."""
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


def _scale(layer: Layer) -> float:
    q = layer.get_inputs()[0]
    assert q is not None
    return float(layer.attribute("scale", None) or 1.0 / math.sqrt(int(q.shape[3] or 1)))


class MnnFile:
    """An ONNX file as MNN runs it by itself: its own converter and options, float32, no guards."""

    def __init__(self, path: Path, threads: int | None) -> None:
        import onnx

        graph = onnx.load(path, load_external_data=False).graph
        constants = {value.name for value in graph.initializer}
        self.inputs: list[str] = [value.name for value in graph.input if value.name not in constants]
        outputs = [value.name for value in graph.output]
        with tempfile.TemporaryDirectory() as folder:
            converted = Path(folder, "model.mnn")
            reason = convert_file(path, converted)
            if reason is not None:
                raise EngineError(f"MNN's converter refuses {path}: {reason}")
            self._module, self._runtime = load_module(converted, self.inputs, outputs, threads=threads)

    def run(self, values: Mapping[str, Any]) -> list[Any]:
        """The outputs, in the order of the file, in 32 bits. EngineError if an integer needs more."""
        inputs = []
        for name in self.inputs:
            array = np.ascontiguousarray(values[name])
            is_float = array.dtype.kind == "f"
            short = array.astype(np.float32 if is_float else np.int32, copy=False)
            if not is_float and not np.array_equal(short, array):
                raise EngineError(
                    f"MNN reads integers in 32 bits, and {name} holds {array.min()} to {array.max()}"
                )
            inputs.append(variable(short))
        return [array_of(result) for result in self._module.onForward(inputs)]

    def run_inside(self, values: Mapping[str, Any]) -> Arrays:
        raise EngineError("MNN does not show intermediate values")
