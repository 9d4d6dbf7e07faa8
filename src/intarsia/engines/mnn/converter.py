"""Networks, and ONNX files of any origin, in MNN's own form: its converter runs in a process of its own."""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from intarsia.engines.base import Arrays
from intarsia.engines.guards.kinds import Checks
from intarsia.engines.mnn.layers import add_checks, planned, spread_choices, spreads_both
from intarsia.engines.mnn.program import array_of, load_module, variable
from intarsia.errors import EngineError
from intarsia.network import Layer, Network, Tensor
from intarsia.network import functional as F
from intarsia.network.ops import COMPARES
from intarsia.network.serialize import to_proto


def written_out(net: Network) -> Network:
    """A copy whose layers MNN's converter reads, and does not shorten."""
    return net.with_replaced(lambda layer: layer.kind in _WRITTEN, lambda layer: _WRITTEN[layer.kind](layer))


def _gelu(layer: Layer) -> Tensor:
    """MNN computes GELU by tanh, off by 2e-4 of the largest result, also where it finds the error function of
    a quotient; it leaves a product alone.
    """
    (x,) = _operands(layer)
    if layer.attribute("approximate", "none") == "tanh":
        gate = F.tanh((x + x * x * x * 0.044715) * math.sqrt(2 / math.pi))
    else:
        gate = F.erf(x * math.sqrt(0.5))
    return x * 0.5 * (gate + 1.0)


def _cast(layer: Layer) -> Tensor:
    """MNN keeps the numbers that it casts to truth values."""
    (x,), to = _operands(layer), layer.get_outputs(0)[0].dtype
    if to != ir.DataType.BOOL:
        return F.op("Cast", x, to=to)
    if x.dtype != ir.DataType.FLOAT:
        return F.logical_not(F.equal(x, 0))
    # Equal compares bits, and those of -0.0 are not those of 0.0.
    return F.logical_not(F.logical_and(F.greater_equal(x, 0.0), F.less_equal(x, 0.0)))


def _compare(layer: Layer) -> Tensor:
    """MNN's Less and Equal compare the bits of floats: wrong for two negative ones, and for both zeros."""
    one, other = _operands(layer)
    if spreads_both(layer):
        one = F.expand(one, _sizes(layer))
    if layer.kind == "Less":
        return F.greater(other, one)
    if layer.kind == "Equal" and one.dtype == ir.DataType.FLOAT:
        return F.logical_and(F.greater_equal(one, other), F.greater_equal(other, one))
    return F.op(layer.kind, one, other)


def _choose(layer: Layer) -> Tensor:
    operands = _operands(layer)
    for place in spread_choices(layer):
        operands[place] = F.expand(operands[place], _sizes(layer))
    return F.op("Where", *operands)


def _gather(layer: Layer) -> Tensor:
    """MNN reads memory at any index, and a guard of a computed index is checked only afterwards."""
    (data, indices), axis = _operands(layer), layer.attribute("axis", 0)
    if indices.constant is None:
        size = int(data.shape[axis] or 0)
        indices = F.minimum(F.maximum(indices, -size), size - 1)
    return F.gather(data, indices, axis)


def _attend(layer: Layer) -> Tensor:
    q, k, v, *mask = _operands(layer)
    scale = float(layer.attribute("scale", None) or 1.0 / math.sqrt(int(q.shape[3] or 1)))
    scores = F.matmul(q * scale, F.transpose(k, [0, 1, 3, 2]))
    if layer.attribute("is_causal", 0):
        lengths = [int(x.shape[2] or 0) for x in (q, k)]
        scores = scores + F.constant(np.triu(np.full(lengths, -np.inf, np.float32), 1))
    for allowed in mask:
        is_truth = allowed.dtype == ir.DataType.BOOL
        scores = F.where(allowed, scores, -math.inf) if is_truth else scores + allowed
    return F.matmul(F.softmax(scores), v)


def _operands(layer: Layer) -> list[Tensor]:
    return [tensor for tensor in layer.get_inputs() if tensor is not None]


def _sizes(layer: Layer) -> list[int]:
    return [int(size or 0) for size in layer.get_outputs(0)[0].shape]


_WRITTEN: dict[str, Callable[[Layer], Tensor]] = {
    "Attention": _attend,
    "Cast": _cast,
    "Gather": _gather,
    "Gelu": _gelu,
    "Where": _choose,
    **dict.fromkeys(COMPARES, _compare),
}


# `MNN.tools`, the documented wrapper of the converter, installs a package when it is imported and reports
# each conversion to a server (MNN 3.6). The library below it, `_tools`, does neither. It prints, and it
# ends the process where a check of its own fails, so it runs in a process of its own.
_CODE = "import sys, _tools; sys.exit(0 if _tools.mnnconvert(sys.argv) else 3)"
_MOST_BYTES = 2**31 - 1  # of a protobuf


def converted(net: Network, timeout_s: float = 600.0) -> tuple[bytes, Checks]:
    """The network as MNN's file holds it, and what must be checked at a call.

    EngineError with the converter's output if it fails.
    """
    proto, _weights = to_proto(written_out(net), weights_outside=False)
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
