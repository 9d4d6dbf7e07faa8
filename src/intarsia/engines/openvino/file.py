"""An OpenVINO model in a file, whoever wrote it, as OpenVINO runs it on the CPU in float32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from intarsia.engines.base import Arrays
from intarsia.engines.openvino.core import core, last_line
from intarsia.errors import EngineError

# By itself OpenVINO computes in bf16 or fp16 where the processor has it.
_IN_FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32"}


class OpenvinoFile:
    """A compiled model, with its inputs in the order of the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._compiled = core().compile_model(core().read_model(path), "CPU", _IN_FLOAT32)
        except Exception as error:
            raise EngineError(f"OpenVINO cannot load {path}: {last_line(error)}") from error
        self.inputs: list[Any] = [port.get_any_name() for port in self._compiled.inputs]

    def run(self, values: Mapping[str, Any]) -> list[Any]:
        """The outputs, in the order of the file."""
        made = self._compiled(dict(values))
        return [made[port].copy() for port in self._compiled.outputs]

    def run_inside(self, values: Mapping[str, Any]) -> Arrays:
        """The first result of every operation."""
        import openvino

        model = core().read_model(self._path)
        known = ("Parameter", "Constant", "Result")
        operations = [op for op in model.get_ordered_ops() if op.get_type_name() not in known]
        whole = openvino.Model([op.output(0) for op in operations], model.get_parameters())
        compiled = core().compile_model(whole, "CPU", _IN_FLOAT32)
        made = compiled(dict(values))
        names = [op.get_friendly_name() for op in operations]
        return dict(zip(names, [made[port].copy() for port in compiled.outputs], strict=True))
