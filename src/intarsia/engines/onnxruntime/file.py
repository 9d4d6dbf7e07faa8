"""An ONNX file, whoever wrote it, as ONNX Runtime runs it on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from intarsia.engines.base import Arrays
from intarsia.errors import EngineError

_CPU = ["CPUExecutionProvider"]


class OnnxFile:
    """A session, with its inputs in the order of the file."""

    def __init__(self, path: Path) -> None:
        import onnxruntime as ort

        self._path = path
        try:
            self._session = ort.InferenceSession(path, providers=_CPU)
        except Exception as error:  # ONNX Runtime raises classes of its own
            said = next(iter(str(error).splitlines()), "")
            raise EngineError(f"ONNX Runtime cannot load {path}: {said}") from error
        self.inputs: list[Any] = [item.name for item in self._session.get_inputs()]

    def run(self, values: Mapping[str, Any]) -> list[Any]:
        """The outputs, in the order of the file."""
        return list(self._session.run(None, dict(values)))

    def run_inside(self, values: Mapping[str, Any]) -> Arrays:
        """Every value of the main graph. ONNX Runtime fuses less where all values are asked for."""
        import onnx
        import onnxruntime as ort

        model = onnx.load(self._path)
        names = [name for node in model.graph.node for name in node.output if name]
        del model.graph.output[:]
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
        session = ort.InferenceSession(model.SerializeToString(), providers=_CPU)
        return dict(zip(names, session.run(names, dict(values)), strict=True))
