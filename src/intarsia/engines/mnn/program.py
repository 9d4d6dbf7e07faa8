"""MNN's library, and a module of MNN's as a program of ours."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from intarsia.engines.base import GuardedProgram
from intarsia.engines.guards.kinds import Checks
from intarsia.engines.ports import Ports

# MNN's library, which prints to the standard output of the process.


@functools.cache
def library() -> Any:
    with silent_stdout():
        import MNN.nn
    return MNN.nn


_stdout_lock = threading.Lock()


@contextmanager
def silent_stdout() -> Iterator[None]:
    """Within it the process writes nothing to its standard output: MNN prints what the processor can do.

    It prints by C's library, which holds text back: that is written out before and after.
    """
    flush = ctypes.CDLL(None).fflush
    with _stdout_lock:
        flush(None)
        remaining, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, 1)
            yield
        finally:
            flush(None)
            os.dup2(remaining, 1)
            os.close(remaining)
            os.close(nowhere)


CHECKS = "intarsia_checks"  # the output with a number for each guard
# MNN's kernels compare and clamp by vector instructions that pass over NaN, and some square what they are
# given. Numbers up to this one are answered as PyTorch answers them; others are rare, and are PyTorch's.
LARGEST = 2.0**50
_WHOLE = 2**31 - 1


class MnnProgram(GuardedProgram):
    """Inputs are copied in and results out: MNN lays memory out by itself.

    A module serves one call at a time; every thread runs a clone, which shares the weights. A process that
    was forked has no threads of MNN and would wait for them forever: PyTorch runs there.
    """

    def __init__(self, ports: Ports, module: Any, runtime: object, checks: Checks) -> None:
        import MNN.expr

        super().__init__(ports, checks)
        self._ports = ports
        self._module = module
        self._runtime = runtime  # the module does not keep it alive
        self._expr = MNN.expr
        self._clones = threading.local()
        self._process = os.getpid()
        self._cloning = threading.Lock()

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if os.getpid() != self._process:
            return self._left(tensors, "MNN's threads do not exist in a forked process")
        taken = []
        for port, tensor in zip(self._ports.inputs, tensors, strict=True):
            tensor = (
                tensor.detach()
                if isinstance(tensor, torch.Tensor)
                else torch.tensor(tensor, dtype=port.dtype)
            )
            if (reason := _refusal(port.name, tensor)) is not None:
                return self._left(tensors, reason)
            taken.append(tensor)
        if (reason := self._broken_input(lambda place: taken[place].numpy(), taken)) is not None:
            return self._left(tensors, reason)
        results = self._own_module().onForward(list(map(self._value, taken)))
        if self._computed and (reason := self._broken(self._array(results.pop()), tensors)) is not None:
            return self._left(tensors, reason)
        outputs = []
        for port, result in zip(self._ports.outputs, results, strict=True):
            outputs.append(output := torch.from_numpy(self._array(result)).to(port.dtype))
            reason = _refusal(port.name, output)
            if reason is not None:
                return self._left(tensors, reason)
        return tuple(outputs)

    def _value(self, tensor: torch.Tensor) -> Any:
        is_float = tensor.dtype.is_floating_point
        array = (tensor if is_float else tensor.to(torch.int32)).contiguous().numpy()
        dtype = self._expr.float if is_float else self._expr.int
        return self._expr.const(array, list(array.shape), self._expr.NCHW, dtype)

    def _own_module(self) -> Any:
        own = self._clones.__dict__
        if "module" not in own:
            with self._cloning:
                own["module"] = self._module.clone(True)
        return own["module"]

    def _array(self, value: Any) -> Any:
        if value.data_format != self._expr.NCHW:
            value = self._expr.convert(value, self._expr.NCHW)
        return np.array(value.read(), copy=True).reshape(value.shape)


def _refusal(name: str, tensor: torch.Tensor) -> str | None:
    """Why MNN may treat these values unlike PyTorch; None if it does not."""
    if not tensor.numel():
        return f"{name} is empty"
    if tensor.dtype in (torch.bool, torch.int32):
        return None
    low, high = torch.aminmax(tensor)
    if not tensor.dtype.is_floating_point:
        fits = low >= -_WHOLE and high <= _WHOLE
        return None if fits else f"{name} holds {int(low)} to {int(high)}, beyond 32 bits"
    if low >= -LARGEST and high <= LARGEST:  # neither holds of NaN
        return None
    return f"{name} holds NaN, an infinity or a number beyond {LARGEST:.0e}"
