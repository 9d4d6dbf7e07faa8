"""Compiled models as programs, and as files: tensors passed where torch has them, weights left apart."""

from __future__ import annotations

import math
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch

from intarsia.engines.base import GrowingFile, GuardedProgram
from intarsia.engines.guards.kinds import LONGEST_INPUT, Checks
from intarsia.engines.openvino.core import compile_model, core
from intarsia.engines.ports import Ports

# A model in OpenVINO's compiled form, whose weights stay in a file of ours.
#
# Integers wider than 32 bits are narrowed here: OpenVINO 2026.4 keeps their lower bits when it reads a
# compiled model, so a slice to the end of a varying size (2**63 - 1) lost its last element.


# OpenVINO leaves weights out of what it exports if it has read them from a file: it knows their places there.
_WITHOUT_WEIGHTS = {"CACHE_MODE": "OPTIMIZE_SIZE"}
_ALIGNMENT = 64
# Reading a model, OpenVINO computes the range of indices before it has the constants: a division by one that
# is still 0 ends the process (2026.4).
_DIVISIONS = ("Mod", "FloorMod", "Divide")
_NARROW = (-(2**31), 2**31 - 1)


def export(model: Any, config: Mapping[str, Any], file: GrowingFile) -> bytes | None:
    """The model, compiled; None for one with bodies, or constants of one name, whose places are unknown,
    and for one that OpenVINO cannot read again (Swin's, in 2026.4; integers that are divided; weights of more
    than 32 bits) or that then answers differently.

    The model is written as OpenVINO's own description, in which every constant is then said to lie in our
    file; read from there and compiled, it is exported without weights.
    """
    import openvino

    if any(_divides_integers(op) for op in model.get_ops()):
        return None
    constants = {op.get_friendly_name(): op for op in model.get_ops() if op.get_type_name() == "Constant"}
    if any(name in file.places and _is_wide(op) for name, op in constants.items()):
        return None
    with tempfile.TemporaryDirectory() as folder:
        described = Path(folder, "model.xml")
        openvino.serialize(model, described, os.devnull)
        tree = ElementTree.parse(described)
        results = [layer for layer in tree.iter("layer") if layer.get("type") == "Const"]
        names = Counter(str(layer.get("name")) for layer in results)
        if next(tree.iter("body"), None) is not None or names != Counter(list(constants)):
            return None
        inside = {name: op for name, op in constants.items() if name not in file.places}
        places = {**file.places, **_appended(inside, file)}
        for layer in results:
            data = layer.find("data")
            if data is None or int(data.get("size", -1)) != constants[str(layer.get("name"))].get_byte_size():
                return None
            data.set("offset", str(places[str(layer.get("name"))]))
        tree.write(described)
        blob, expected = _exported(described, config, file.path)
        try:
            again, _kept = imported(memoryview(bytearray(blob)), config, file.path)
            return blob if _are_alike(_answer(again), expected) else None
        except Exception:  # what OpenVINO refuses of its own is not worth a file's space
            return None


def _exported(described: Path, config: Mapping[str, Any], path: str) -> tuple[bytes, list[Any]]:
    """A model compiled, as a file without its weights, and what it answers."""
    compiled = compile_model(core().read_model(described, path), {**config, **_WITHOUT_WEIGHTS})
    return bytes(compiled.export_model().getvalue()), _answer(compiled)


def _divides_integers(op: Any) -> bool:
    return op.get_type_name() in _DIVISIONS and op.get_output_element_type(0).is_integral()


def _answer(compiled: Any) -> list[Any]:
    """What a compiled model answers to some inputs.

    Where sizes vary it is not run: OpenVINO crashes on sizes that do not fit each other, and which sizes fit
    is not known here.
    """
    if any(port.get_partial_shape().is_dynamic for port in compiled.inputs):
        return []
    inputs = []
    for port in compiled.inputs:
        shape = [size.get_length() for size in port.get_partial_shape()]
        dtype, count = port.get_element_type().to_dtype(), int(np.prod(shape))
        values = np.linspace(-1, 1, count) if np.issubdtype(dtype, np.floating) else np.zeros(count)
        inputs.append(values.astype(dtype).reshape(shape))
    return list(compiled.create_infer_request().infer(inputs, share_outputs=False).values())


def _are_alike(one: list[Any], other: list[Any]) -> bool:
    """Whether answers have the same bits."""
    pairs = zip(one, other, strict=True)
    return all(np.array_equal(a, b, equal_nan=np.issubdtype(a.dtype, np.floating)) for a, b in pairs)


def _appended(constants: Mapping[str, Any], file: GrowingFile) -> dict[str, int]:
    """Write constants into the file; returns the offset of each."""
    joined, at = bytearray(), {}
    for name, op in constants.items():
        at[name] = len(joined)
        joined += _bytes(op)
        joined += bytes(-len(joined) % _ALIGNMENT)
    start = file.append(bytes(joined)) if joined else 0
    return {name: start + place for name, place in at.items()}


def _is_wide(op: Any) -> bool:
    """Whether a constant holds integers beyond 32 bits.

    OpenVINO computes with 32. Compiling, it takes the nearest of a larger one (the end of a slice that has
    none, say); reading a compiled model it takes the lower bits (2026.4): -1 for the largest.
    """
    if op.data.dtype not in (np.int64, np.uint64, np.uint32) or op.data.size == 0:
        return False
    low, high = _NARROW
    return bool(op.data.min() < low or op.data.max() > high)


def _bytes(op: Any) -> bytes:
    raw = bytes((op.data.clip(*_NARROW).astype(op.data.dtype) if _is_wide(op) else op.data).tobytes())
    if len(raw) != op.get_byte_size():
        raise ValueError(f"{op.get_friendly_name()} has {len(raw)} bytes, not {op.get_byte_size()}")
    return raw


def imported(blob: memoryview, config: Mapping[str, Any], path: str) -> tuple[Any, object]:
    """The compiled model, and what keeps its memory alive."""
    import openvino

    array = np.frombuffer(blob, np.uint8)
    if not array.flags.writeable:
        array = array.copy()
    tensor = openvino.Tensor(array, shared_memory=True)
    settings = {**config, **_WITHOUT_WEIGHTS, "WEIGHTS_PATH": path}
    return core().import_model(tensor, "CPU", settings), (array, tensor)


# A compiled OpenVINO model as a program: tensors passed where torch has them, guards looked at.


# Bytes of a result that are copied sooner than memory of its own is bound: a token's keys and values, say.
_COPIED = 1 << 16


class CompiledModel(GuardedProgram):
    """One compiled model; each thread has an inference request of its own."""

    def __init__(self, ports: Ports, compiled: Any, weights: object, checks: Checks | None) -> None:
        import openvino

        super().__init__(ports, checks or Checks())
        self._vary = [i for i, port in enumerate(ports.inputs) if checks and port.shape is None]
        self._compiled = compiled
        self._weights = weights  # the model reads them where they lie
        self._tensor = openvino.Tensor
        # An input that no layer reads is not an input of the model any more.
        places = {name: place for place, match in enumerate(compiled.inputs) for name in match.names}
        self._inputs = [(places.get(port.name), port.dtype) for port in ports.inputs]
        self._outputs = [(port.dtype, port.shape) for port in ports.outputs]
        self._types = {
            dtype: _ov_type(openvino, dtype)
            for dtype in [*(d for _, d in self._inputs), *(d for d, _ in self._outputs)]
        }
        self._requests = threading.local()

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own = self._requests.__dict__
        request = own.get("request")
        if request is None:
            request = self._compiled.create_infer_request()
            own["bound"] = [None] * len(self._inputs)
            own["small"] = self._small_outputs(request)
            if self._computed:
                own["numbers"] = np.zeros(len(self._computed), np.float32)
                request.set_output_tensor(
                    len(self._outputs), self._tensor(own["numbers"], shared_memory=True)
                )
            own["request"] = request
        if self._vary and self._too_long(tensors):
            return self._left(tensors, f"a dimension is longer than {LONGEST_INPUT}")
        read: list[torch.Tensor] = []  # the request does not keep alive the memory it reads
        for (port, dtype), tensor in zip(self._inputs, tensors, strict=True):
            if not isinstance(tensor, torch.Tensor):
                tensor = torch.tensor(tensor, dtype=dtype)
            elif tensor.requires_grad:
                tensor = tensor.detach()
            read.append(tensor if port is None else tensor.contiguous())
        if (
            self._given
            and (reason := self._broken_input(lambda place: read[place].numpy(), read)) is not None
        ):
            return self._left(tensors, reason)
        bound = own["bound"]
        for place, ((port, _), tensor) in enumerate(zip(self._inputs, read, strict=True)):
            if port is None:
                continue
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
        if self._computed and (reason := self._broken(own["numbers"], tensors)) is not None:
            return self._left(tensors, reason)
        for index, (dtype, shape) in enumerate(self._outputs):
            if index in small:
                results[index] = small[index].clone()
            elif shape is None:
                results[index] = _copy(request.get_output_tensor(index), dtype)
        return tuple(results)  # type: ignore[arg-type]

    def _small_outputs(self, request: Any) -> dict[int, torch.Tensor]:
        """Memory that a request writes small results to, by their place; it stays bound."""
        results = {}
        for index, (dtype, shape) in enumerate(self._outputs):
            if shape is None or not 0 < math.prod(shape) * dtype.itemsize <= _COPIED:
                continue
            results[index] = torch.empty(shape, dtype=dtype)
            request.set_output_tensor(index, self._share(results[index]))
        return results

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
