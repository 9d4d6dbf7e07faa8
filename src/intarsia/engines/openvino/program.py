"""A compiled OpenVINO model as a program: tensors passed where torch has them, guards looked at."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import torch

from intarsia.engines.base import GuardedProgram
from intarsia.engines.guards.cached_squares import is_known_to_hold
from intarsia.engines.guards.checks import Checks
from intarsia.engines.guards.inputs import input_check, told_of
from intarsia.engines.guards.kinds import LONGEST_INPUT
from intarsia.engines.ports import Ports

# Bytes of a result that are copied sooner than memory of its own is bound: a token's keys and values, say.
_COPIED = 1 << 16


class CompiledModel(GuardedProgram):
    """One compiled model; each thread has an inference request of its own."""

    def __init__(self, ports: Ports, compiled: Any, weights: object, checks: Checks | None) -> None:
        import openvino

        self._guards = [] if checks is None else checks.made
        self._most = None if checks is None else checks.most
        self._names = [port.name for port in ports.inputs]
        self._vary = [i for i, port in enumerate(ports.inputs) if checks and port.shape is None]
        self._compiled = compiled
        self._weights = weights  # the model reads them where they lie
        self._tensor = openvino.Tensor
        # An input that no layer reads is not an input of the model any more.
        places = {name: place for place, found in enumerate(compiled.inputs) for name in found.names}
        given = {} if checks is None else checks.given
        self._inputs = [
            (places.get(port.name), port.dtype, [(g, input_check(g)) for g in given.get(port.name, [])])
            for port in ports.inputs
        ]
        self._outputs = [(port.dtype, port.shape) for port in ports.outputs]
        self._types = {
            dtype: _ov_type(openvino, dtype)
            for dtype in [*(d for _, d, _ in self._inputs), *(d for d, _ in self._outputs)]
        }
        self._requests = threading.local()

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own = self._requests.__dict__
        request = own.get("request")
        if request is None:
            request = self._compiled.create_infer_request()
            own["bound"] = [None] * len(self._inputs)
            own["small"] = self._small_outputs(request)
            if self._guards:
                own["numbers"] = np.zeros(len(self._guards), np.float32)
                request.set_output_tensor(
                    len(self._outputs), self._tensor(own["numbers"], shared_memory=True)
                )
            own["request"] = request
        if self._vary and self._too_long(tensors):
            return self._left(tensors, f"a dimension is longer than {LONGEST_INPUT}")
        read: list[torch.Tensor] = []  # the request does not keep alive the memory it reads
        bound = own["bound"]
        for place, ((port, dtype, checks), tensor) in enumerate(zip(self._inputs, tensors, strict=True)):
            if port is None:
                continue
            if not isinstance(tensor, torch.Tensor):
                tensor = torch.tensor(tensor, dtype=dtype)
            elif tensor.requires_grad:
                tensor = tensor.detach()
            read.append(tensor := tensor.contiguous())
            for guard, holds in checks:
                if not is_known_to_hold(guard, tensor) and not holds(tensor.numpy()):
                    return self._left(tensors, told_of([guard], self._names, tensors))
            memory = (tensor.data_ptr(), tensor.shape, tensor.dtype)
            if memory != bound[place]:  # a cache of keys and values stands where it stood at the last call
                request.set_input_tensor(port, self._share(tensor))
                bound[place] = memory
        small: dict[int, torch.Tensor] = own["small"]
        results: list[torch.Tensor | None] = []
        for index, (dtype, shape) in enumerate(self._outputs):
            if shape is None or index in small:
                results.append(None)
                continue
            out = torch.empty(shape, dtype=dtype)
            if out.numel():  # nothing is written to an empty one, and a folded one cannot be bound
                request.set_output_tensor(index, self._share(out))
            results.append(out)
        request.infer()
        if self._guards and not (held := own["numbers"] <= self._most).all():
            broken = [guard for guard, fine in zip(self._guards, held, strict=True) if not fine]
            return self._left(tensors, told_of(broken, self._names, tensors))
        for index, (dtype, shape) in enumerate(self._outputs):
            if index in small:
                results[index] = small[index].clone()
            elif shape is None:
                results[index] = _copy(request.get_output_tensor(index), dtype)
        return tuple(results)  # type: ignore[arg-type]

    def _small_outputs(self, request: Any) -> dict[int, torch.Tensor]:
        """Memory that a request writes small results to, by their place; it is bound for good."""
        made = {}
        for index, (dtype, shape) in enumerate(self._outputs):
            if shape is None or not 0 < math.prod(shape) * dtype.itemsize <= _COPIED:
                continue
            made[index] = torch.empty(shape, dtype=dtype)
            request.set_output_tensor(index, self._share(made[index]))
        return made

    @property
    def guards(self) -> list[str]:
        """What must hold for the engine to answer, in words."""
        return [str(g) for _, _, checks in self._inputs for g, _ in checks] + [str(g) for g in self._guards]

    def _too_long(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        return any(max(tensors[i].shape, default=0) > LONGEST_INPUT for i in self._vary)

    def _share(self, tensor: torch.Tensor) -> Any:
        dtype = tensor.dtype
        if dtype == torch.bfloat16:
            raw = tensor.view(torch.int16).numpy()
            return self._tensor(raw, tensor.shape, self._types[dtype])
        return self._tensor(tensor.numpy(), shared_memory=True)


def _ov_type(openvino: Any, dtype: torch.dtype) -> Any:
    return openvino.Type.bf16 if dtype == torch.bfloat16 else None


def _copy(tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    # The request writes into the same memory at its next call.
    data = tensor.data
    if dtype == torch.bfloat16:
        return torch.from_numpy(data.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(data.copy())
