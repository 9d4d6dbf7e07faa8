"""ONNX Runtime's execution providers, and calls of its sessions on an NVIDIA GPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from intarsia.engines.guards.kinds import Checks
from intarsia.engines.onnxruntime.session import BoundSession
from intarsia.engines.ports import Ports

# Calls of an ONNX Runtime session on an NVIDIA GPU, in the order of torch's stream.
#
# A session launches its kernels on the stream that it was made with. Events put that stream between what
# torch has queued before and what it queues after; nobody waits on the host, and a graph recorded by torch
# holds the session's kernels too:
#
#     torch's stream   ── … ──●                      ●── … ──
#                             └▶ session's kernels ──┘
#
# A session keeps the stream it was made with, and torch records on another one each time. So sessions share
# a side stream that events fork from torch's and join again: no host waits, and a recording holds the
# session's kernels.


def side_stream() -> torch.cuda.Stream:
    """The stream of every session on the current device: their working memory is used in its order."""
    return _stream(torch.cuda.current_device())


@functools.cache
def _stream(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]


class CudaSession(BoundSession):
    """Results are torch's memory where their sizes are known; guards are read back, and wait for the GPU."""

    device = "cuda"
    own_workspace = True  # what it works in is not torch's, and is the same at every call

    def __init__(self, ports: Ports, session: Any, weights: object, checks: Checks) -> None:
        super().__init__(ports, session, weights, checks)
        import onnxruntime

        self._stream = side_stream()
        self.index = self._stream.device_index
        self._options = onnxruntime.RunOptions()
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    @property
    def waits_for(self) -> list[str]:
        """The guards that it reads back from the GPU at every call, as text."""
        return self.guards

    def _as_torch(self, value: Any) -> torch.Tensor:
        """A copy in torch's memory: the session would use its own again in the order of its stream only."""
        result = super()._as_torch(value).clone()
        self._stream.wait_stream(torch.cuda.current_stream(self.index))
        return result

    def _run_bound(self, binding: Any) -> None:
        callers = torch.cuda.current_stream(self.index)
        self._stream.wait_stream(callers)
        try:
            self._session.run_with_iobinding(binding, self._options)
        finally:
            callers.wait_stream(self._stream)
        if self._computed:
            self._stream.synchronize()


# ONNX Runtime's execution providers, by the device that a model is on.


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
    """The providers to use, in order, with their options.

    On a GPU they share one stream of ours, and shorten float32 (TF32) only where torch's products do.
    """
    if device == "cpu":
        return [(_CPU, {})]
    stream = side_stream()
    options = {"user_compute_stream": str(stream.cuda_stream)}
    if stream.device_index:  # with device 0 too, ONNX Runtime warns about a plugin that was not requested
        options["device_id"] = str(stream.device_index)
    exact = {"use_tf32": "1" if torch.backends.cuda.matmul.allow_tf32 else "0"}
    own = [(_TENSORRT, dict(options))] if tensorrt else []
    return [*own, (_CUDA, options | exact)]
