"""An engine for Intarsia over NumPy: a table with one function an operator.

It is slow and small, and shows the whole contract of `intarsia.engines.NetworkEngine`: it refuses layers with
a reason, builds and packs programs, proposes options to measure, and tells its version. Intarsia finds it by
its entry point once it is installed (`pip install ./examples/engine_package`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import onnx
import torch
from onnx import numpy_helper

from intarsia.engines import Engine, GrowingFile, NetworkEngine, Packed, Program, WeightFile, Workload
from intarsia.errors import EngineError
from intarsia.network import Network
from intarsia.network.serialize import to_proto

Array = np.ndarray[Any, Any]


def _erf(x: Array) -> Array:
    return np.vectorize(math.erf, otypes=[np.float64])(x).astype(x.dtype)


def _gemm(a: Array, b: Array, c: Array | None = None, **attributes: Any) -> Array:
    a = a.T if attributes.get("transA") else a
    b = b.T if attributes.get("transB") else b
    product = attributes.get("alpha", 1.0) * (a @ b)
    return product if c is None else product + attributes.get("beta", 1.0) * c


def _gelu(x: Array, approximate: bytes = b"none") -> Array:
    if approximate == b"tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + _erf(x / math.sqrt(2)))


# What the engine can run: operators of ONNX with their attributes as keywords. Everything else is refused.
OPERATORS: dict[str, Callable[..., Array]] = {
    "Add": np.add,
    "Div": np.divide,
    "Erf": _erf,
    "Gelu": _gelu,
    "Gemm": _gemm,
    "Identity": lambda x: x,
    "MatMul": np.matmul,
    "Mul": np.multiply,
    "Relu": lambda x: np.maximum(x, 0),
    "Reshape": lambda x, shape, allowzero=0: x.reshape([int(size) for size in shape]),
    "Sub": np.subtract,
    "Tanh": np.tanh,
    "Transpose": lambda x, perm=None: np.transpose(x, perm),
}


@dataclass(frozen=True)
class NumPy(NetworkEngine):
    """Runs a handful of operators in float32. With `column_major`, matrices of weights are laid out so.

    The fields of the dataclass are the options: they are part of `key()`, and a search may vary them.
    """

    column_major: bool = False
    name: ClassVar[str] = "numpy"
    libraries: ClassVar[tuple[str, ...]] = ("numpy",)  # `version()` is made of this package's and NumPy's

    def unavailable(self) -> str | None:
        return None  # else a sentence that says what to install

    @classmethod
    def is_default(cls, device: str) -> bool:
        return False  # it is slow: only by name

    def variants(self, workload: Workload) -> list[tuple[str, Engine]]:
        """A search measures these beside the engine as the user gave it."""
        return [] if self.column_major else [("column major", replace(self, column_major=True))]

    # `patterns()` is left as it is: of the shipped rewriting patterns that make ONNX's own operators, those
    # are applied whose layers `probe` takes, such as the one that makes a Gelu of an Erf.

    def probe(self, net: Network) -> str | None:
        for layer in net.get_layers():
            if layer.kind not in OPERATORS:
                return f"NumPy has no {layer.kind} here"
        for tensor in net.get_inputs():
            if tensor.dtype.name != "FLOAT":
                return f"{tensor.name} is of {tensor.dtype.name}, and only FLOAT is handled"
        return None

    def build(self, net: Network) -> Program:
        reason = self.probe(net)
        if reason is not None:
            raise EngineError(reason)
        model, _ = to_proto(net, weights_outside=False)
        weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        return NumPyProgram(model.graph, weights, self.column_major)

    def pack(self, net: Network, file: GrowingFile) -> Packed | None:
        """The ONNX model without its large weights: those lie in the archive anyway."""
        model, _outside = to_proto(net)
        inside = [tensor for tensor in model.graph.initializer if not tensor.external_data]
        del model.graph.initializer[:]
        model.graph.initializer.extend(inside)
        return Packed(model.SerializeToString(), {"operators": len(model.graph.node)})

    def unpack(
        self,
        blob: memoryview,
        about: Mapping[str, Any],
        file: WeightFile,
        weights: Mapping[str, torch.Tensor],
    ) -> Program:
        model = onnx.load_from_string(bytes(blob))
        unknown = [node.op_type for node in model.graph.node if node.op_type not in OPERATORS]
        if unknown or len(model.graph.node) != about["operators"]:
            raise EngineError("the packed model is not one of this engine")
        arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        arrays |= {name: weight.numpy(force=True) for name, weight in weights.items()}
        return NumPyProgram(model.graph, arrays, self.column_major)


class NumPyProgram:
    """The operators of a graph in order. It holds no state between calls, so many threads may call it."""

    def __init__(self, graph: Any, weights: Mapping[str, Array], column_major: bool) -> None:
        order = np.asfortranarray if column_major else np.ascontiguousarray
        self._weights = {name: order(array) for name, array in weights.items()}
        self._steps = [(node, _attributes(node)) for node in graph.node]
        self._inputs = [value.name for value in graph.input if value.name not in weights]
        self._outputs = [value.name for value in graph.output]

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values: dict[str, Array | None] = {
            "": None,
            **self._weights,
        }  # an operand that is left out is called ""
        values |= {name: x.numpy(force=True) for name, x in zip(self._inputs, inputs, strict=True)}
        for node, attributes in self._steps:
            operands = [values[name] for name in node.input]
            values[node.output[0]] = OPERATORS[node.op_type](*operands, **attributes)
        # A result lies in memory of its own, which no later call writes to.
        return tuple(torch.from_numpy(np.array(values[name])) for name in self._outputs)


def _attributes(node: Any) -> dict[str, Any]:
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
