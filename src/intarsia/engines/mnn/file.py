"""An ONNX file as MNN runs it by itself: its own converter, its own options, and none of our guards."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from intarsia.cache.machine import thread_count
from intarsia.engines.base import Arrays
from intarsia.engines.mnn.converter import convert_file
from intarsia.engines.mnn.program import library, silent_stdout
from intarsia.errors import EngineError


class MnnFile:
    """A module in float32, with its inputs in the order of the file."""

    def __init__(self, path: Path, threads: int | None) -> None:
        import onnx

        graph = onnx.load(path, load_external_data=False).graph
        constants = {value.name for value in graph.initializer}
        self.inputs: list[str] = [value.name for value in graph.input if value.name not in constants]
        outputs = [value.name for value in graph.output]
        nn = library()
        settings = {"backend": "CPU", "precision": "high", "numThread": thread_count(threads)}
        with tempfile.TemporaryDirectory() as folder:
            converted = Path(folder, "model.mnn")
            reason = convert_file(path, converted)
            if reason is not None:
                raise EngineError(f"MNN's converter refuses {path}: {reason}")
            with silent_stdout():
                self._runtime = nn.create_runtime_manager((settings,))
                self._module = nn.load_module_from_file(
                    str(converted), self.inputs, outputs, runtime_manager=self._runtime, shape_mutable=True
                )
        if self._module is None:
            raise EngineError(f"MNN cannot load {path}")

    def run(self, values: Mapping[str, Any]) -> list[Any]:
        """The outputs, in the order of the file, in 32 bits. EngineError if an integer needs more."""
        import MNN.expr as expr

        inputs = []
        for name in self.inputs:
            array = np.ascontiguousarray(values[name])
            is_float = array.dtype.kind == "f"
            short = array.astype(np.float32 if is_float else np.int32, copy=False)
            if not is_float and not np.array_equal(short, array):
                raise EngineError(
                    f"MNN reads integers in 32 bits, and {name} holds {array.min()} to {array.max()}"
                )
            inputs.append(
                expr.const(short, list(short.shape), expr.NCHW, expr.float if is_float else expr.int)
            )
        results = self._module.onForward(inputs)
        plain = [x if x.data_format == expr.NCHW else expr.convert(x, expr.NCHW) for x in results]
        return [np.array(x.read(), copy=True).reshape(x.shape) for x in plain]

    def run_inside(self, values: Mapping[str, Any]) -> Arrays:
        raise EngineError("MNN does not show intermediate values")
