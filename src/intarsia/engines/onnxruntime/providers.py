"""ONNX Runtime's execution providers, by the device that a model is on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from intarsia.engines.onnxruntime.cuda import side_stream

_CPU, _CUDA, _TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"


def missing_provider(device: str, tensorrt: bool, available: Sequence[str]) -> str | None:
    """Why an ONNX Runtime with these providers cannot be used; None if it can."""
    if tensorrt and device != "cuda":
        return f"TensorRT runs on device='cuda', not {device!r}"
    wanted = {"cpu": [_CPU], "cuda": [_CUDA, *[_TENSORRT] * tensorrt]}.get(device, [f"for {device!r}"])
    for provider in wanted:
        if provider not in available:
            return f"this onnxruntime has no provider {provider}; it has {', '.join(available)}"
    return None


def providers(device: str, tensorrt: bool) -> list[tuple[str, dict[str, Any]]]:
    """The providers to ask, in order, with their options.

    On a GPU they share a stream that we know, and shorten float32 (TF32) only where torch's products do.
    """
    if device == "cpu":
        return [(_CPU, {})]
    stream = side_stream()
    options = {"user_compute_stream": str(stream.cuda_stream)}
    if stream.device_index:  # told of device 0 too, ONNX Runtime warns of a plugin that nobody asked for
        options["device_id"] = str(stream.device_index)
    exact = {"use_tf32": "1" if torch.backends.cuda.matmul.allow_tf32 else "0"}
    own = [(_TENSORRT, dict(options))] if tensorrt else []
    return [*own, (_CUDA, options | exact)]
