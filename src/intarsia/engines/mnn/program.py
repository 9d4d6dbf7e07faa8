"""MNN's library, and a module of MNN's as a program of ours."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from intarsia.cache.machine import thread_count
from intarsia.engines.base import GuardedProgram
from intarsia.engines.guards.kinds import Checks
from intarsia.engines.ports import Ports
from intarsia.errors import EngineError

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


# `WINOGRAD_MEMORY_LEVEL` of MNN's hints. From level 1 on MNN multiplies fewer numbers for a window of 3 x 3
# and more, and loses digits: off by 1e-3 of the largest result for 3 x 3 at level 3, 8e-4 for 7 x 7 at
# level 1; at level 0 by 2e-6 (MNN 3.6.1).
_WINOGRAD_HINT = 3


def load_module(
    path: Path,
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    threads: int | None,
    precision: str = "high",
    winograd: int | None = None,
) -> tuple[Any, object]:
    """The module in a file of MNN's, and the runtime, which the module does not keep alive."""
    nn = library()
    settings = {"backend": "CPU", "precision": precision, "numThread": thread_count(threads)}
    with silent_stdout():
        runtime = nn.create_runtime_manager((settings,))
        if winograd is not None:
            runtime.set_hint(_WINOGRAD_HINT, winograd)
        try:
            module = nn.load_module_from_file(
                str(path), list(inputs), list(outputs), runtime_manager=runtime, shape_mutable=True
            )
        except Exception as error:
            raise EngineError(f"MNN cannot load its model: {error}") from error
    if module is None:
        raise EngineError("MNN cannot load its model")
    return module, runtime


def variable(array: np.ndarray[Any, Any]) -> Any:
    """Floats or integers of 32 bits as MNN takes them."""
    import MNN.expr as expr

    dtype = expr.float if array.dtype.kind == "f" else expr.int
    return expr.const(array, list(array.shape), expr.NCHW, dtype)


def array_of(value: Any) -> np.ndarray[Any, Any]:
    """A result of MNN's as an array of its own."""
    import MNN.expr as expr

    if value.data_format != expr.NCHW:
        value = expr.convert(value, expr.NCHW)
    return np.array(value.read(), copy=True).reshape(value.shape)


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
        super().__init__(ports, checks)
        self._ports = ports
        self._module = module
        self._runtime = runtime
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
        results = self._own_module().onForward(list(map(_as_variable, taken)))
        if self._computed and (reason := self._broken(array_of(results.pop()), tensors)) is not None:
            return self._left(tensors, reason)
        outputs = []
        for port, result in zip(self._ports.outputs, results, strict=True):
            outputs.append(output := torch.from_numpy(array_of(result)).to(port.dtype))
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


def _as_variable(tensor: torch.Tensor) -> Any:
    is_float = tensor.dtype.is_floating_point
    return variable((tensor if is_float else tensor.to(torch.int32)).contiguous().numpy())


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
