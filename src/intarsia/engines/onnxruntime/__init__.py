"""ONNX Runtime."""

from intarsia.engines.onnxruntime.engine import OnnxRuntime as OnnxRuntime
