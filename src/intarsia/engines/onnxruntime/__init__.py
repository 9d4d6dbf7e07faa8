"""ONNX Runtime."""

import os

# ONNX Runtime 1.31 sends usage data to Microsoft, unless this is set before it is imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from intarsia.engines.onnxruntime.engine import OnnxRuntime as OnnxRuntime
