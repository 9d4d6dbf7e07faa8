"""A module of MNN's as a program of ours."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import torch

from intarsia.engines.base import GuardedProgram
from intarsia.engines.ports import Ports

# MNN's kernels compare and clamp by vector instructions that pass over NaN, and some square what they are
# given. Numbers up to this one are answered as PyTorch answers them; others are rare, and are PyTorch's.
LARGEST = 2.0**50


class MnnProgram(GuardedProgram):
    """Inputs are copied in and results out: MNN lays memory out by itself.

    A module serves one call at a time; every thread runs a clone, which shares the weights. A process that
    was forked has none of MNN's threads and would wait for them without end: there PyTorch answers.
    """

    def __init__(self, ports: Ports, module: Any, runtime: object) -> None:
        import MNN.expr

        self._ports = ports
        self._module = module
        self._runtime = runtime  # the module does not keep it alive
        self._expr = MNN.expr
        self._clones = threading.local()
        self._process = os.getpid()
        self._cloning = threading.Lock()

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if os.getpid() != self._process:
            return self._left(tensors, "MNN's threads are not in a forked process")
        values = []
        for port, tensor in zip(self._ports.inputs, tensors, strict=True):
            reason = _refusal(port.name, tensor)
            if reason is not None:
                return self._left(tensors, reason)
            array = tensor.detach().contiguous().numpy()
            values.append(self._expr.const(array, list(array.shape), self._expr.NCHW, self._expr.float))
        results = self._own_module().onForward(values)
        outputs = [self._tensor(result) for result in results]
        for port, output in zip(self._ports.outputs, outputs, strict=True):
            reason = _refusal(port.name, output)
            if reason is not None:
                return self._left(tensors, reason)
        return tuple(outputs)

    def _own_module(self) -> Any:
        own = self._clones.__dict__
        if "module" not in own:
            with self._cloning:
                own["module"] = self._module.clone(True)
        return own["module"]

    def _tensor(self, value: Any) -> torch.Tensor:
        if value.data_format != self._expr.NCHW:
            value = self._expr.convert(value, self._expr.NCHW)
        array = np.array(value.read(), copy=True)
        return torch.from_numpy(array.reshape(value.shape))


def _refusal(name: str, tensor: torch.Tensor) -> str | None:
    """Why MNN may treat these values unlike PyTorch; None if it does not."""
    if not tensor.numel():
        return f"{name} is empty"
    if not tensor.dtype.is_floating_point:
        return None
    low, high = torch.aminmax(tensor)
    if low >= -LARGEST and high <= LARGEST:  # neither holds of NaN
        return None
    return f"{name} holds NaN, an infinity or a number beyond {LARGEST:.0e}"
