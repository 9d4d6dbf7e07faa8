"""Sessions of ONNX Runtime as programs, how they get their weights, and sessions over files of any origin."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.utils.dlpack

from intarsia.engines.base import Arrays, GuardedProgram, Program
from intarsia.engines.guards.kinds import Checks
from intarsia.engines.ports import Ports
from intarsia.errors import EngineError, first_line

# Calls of an ONNX Runtime session from torch tensors, without copies.
#
# Results stay in ONNX Runtime's arena and torch wraps them. Binding outputs to fresh torch tensors looked
# like the way without a copy, but fresh pages are faulted in at every call.


OUTPUT = "intarsia_guards"  # the last output, which has a number for each guard
# ONNX's own numbers for types; `network.dtypes` has them too, but needs `onnx_ir`.
_ONNX_TYPES = {
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.uint16: 4,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
    torch.float64: 11,
    torch.uint32: 12,
    torch.uint64: 13,
    torch.bfloat16: 16,
    torch.float8_e4m3fn: 17,
    torch.float8_e4m3fnuz: 18,
    torch.float8_e5m2: 19,
    torch.float8_e5m2fnuz: 20,
}
_FIRST_UNKNOWN_TO_NUMPY = 16  # ONNX Runtime takes ONNX's own number of these


def session_program(ports: Ports, session: Any, weights: object, checks: Checks) -> Program:
    """The program of a session; `weights` are kept alive, since the session reads them where they lie."""
    types = [port.dtype for port in (*ports.inputs, *ports.outputs)]
    kind = ArraySession if all(map(_numpy_has, types)) else BoundSession
    return kind(ports, session, weights, checks)


class Session(GuardedProgram):
    """The state of every session: its weights, the names of its inputs, and what must hold of values."""

    def __init__(self, ports: Ports, session: Any, weights: object, checks: Checks) -> None:
        super().__init__(ports, checks)
        self._session = session
        self._weights = weights
        self._dtypes = [port.dtype for port in ports.inputs]
        self._refusal = refusal()


class ArraySession(Session):
    """On the CPU: inputs are arrays over torch's memory, results tensors over memory fresh from ONNX Runtime.

    Its arena hands memory out again without faulting the pages in, which binding to fresh torch tensors
    pays for at every call.
    """

    def __init__(self, ports: Ports, session: Any, weights: object, checks: Checks) -> None:
        super().__init__(ports, session, weights, checks)
        # The session's own `run` checks names that cannot be wrong here, at a price a small model feels.
        self._run = _bare_run(session)
        self._outputs = [port.name for port in ports.outputs] + [OUTPUT] * bool(checks.computed)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        try:
            feed = {name: tensor.numpy() for name, tensor in zip(self._names, tensors)}  # noqa: B905
        except (AttributeError, RuntimeError):  # a size, or a tensor that asks for gradients
            feed = dict(zip(self._names, map(_array, tensors, self._dtypes), strict=True))
        if self._given:
            broken = self._broken_input(list(feed.values()).__getitem__, tensors)
            if broken is not None:
                return self._left(tensors, broken)
        try:
            result = self._run(self._outputs, feed, None)
        except self._refusal as error:  # an index out of range, which torch may refuse in its own words
            return self._left(tensors, f"ONNX Runtime refuses it: {first_line(error)}")
        if self._computed:
            broken = self._broken(result.pop(), tensors)
            if broken is not None:
                return self._left(tensors, broken)
        return (torch.from_numpy(result[0]),) if len(result) == 1 else tuple(map(torch.from_numpy, result))

    def direct(self, shapes: Sequence[tuple[int, ...]]) -> Callable[..., torch.Tensor] | None:
        """The call of one result, for plain tensors of just these shapes; it raises at any others.

        Nothing is looked at before the run: `numpy()` refuses other devices and gradients, and the session
        other dtypes and shapes. None where the session would take other shapes, makes several results, or
        has guards.
        """
        run, outputs, names, array = self._run, self._outputs, self._names, torch.from_numpy
        taken = [tuple(item.shape) for item in self._session.get_inputs()]
        if self._given or len(outputs) != 1 or taken != list(shapes):
            return None
        if len(names) != 1:
            return lambda *tensors: array(
                run(
                    outputs, {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}, None
                )[0]
            )
        (name,) = names
        return lambda tensor: array(run(outputs, {name: tensor.numpy()}, None)[0])


def weight_value(tensor: torch.Tensor) -> tuple[Any, object]:
    """A weight for a session, where torch has it, and what keeps its memory alive."""
    import onnxruntime

    tensor = tensor.detach().contiguous()
    if _numpy_has(tensor.dtype):
        array = tensor.numpy()
        return onnxruntime.OrtValue.ortvalue_from_numpy(array), array
    raw = tensor.view(torch.uint16 if tensor.itemsize == 2 else torch.uint8).numpy()
    number = _ONNX_TYPES[tensor.dtype]
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, number), raw


def refusal() -> tuple[type[Exception], ...]:
    """What a session raises at values it does not take."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return state.InvalidArgument, state.Fail


def _bare_run(session: Any) -> Any:
    inner = getattr(session, "_sess", None)
    return session.run if inner is None else inner.run


def _array(value: Any, dtype: torch.dtype) -> Any:
    tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=dtype)
    return tensor.numpy(force=True)


class BoundSession(Session):
    """Inputs and outputs bound by address: for dtypes numpy lacks, and where a device holds them.

    Each thread has a binding of its own, bound again at every call.
    """

    device = "cpu"

    def __init__(self, ports: Ports, session: Any, weights: object, checks: Checks) -> None:
        super().__init__(ports, session, weights, checks)
        self.index = 0  # of the device
        self._bindings = threading.local()
        self._inputs = [(port.name, _element_type(port.dtype), port.dtype) for port in ports.inputs]
        self._outputs = [
            (port.name, _element_type(port.dtype), port.dtype, port.shape) for port in ports.outputs
        ]
        self._some_unknown = any(shape is None for *_, shape in self._outputs)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        binding = self._bindings.__dict__.get("binding")
        if binding is None:
            binding = self._bindings.binding = self._session.io_binding()
        where = torch.device(self.device, self.index)
        remaining = []  # copies made here must outlive the run
        for (name, element, dtype), tensor in zip(self._inputs, tensors, strict=True):
            if not isinstance(tensor, torch.Tensor):
                tensor = torch.tensor(tensor, dtype=dtype, device=where)
            if not tensor.is_contiguous():
                tensor = tensor.contiguous()
            remaining.append(tensor.detach())
            binding.bind_input(name, self.device, self.index, element, tensor.shape, tensor.data_ptr())
        if self._given:
            broken = self._broken_input(lambda place: remaining[place].numpy(), tensors)
            if broken is not None:
                return self._left(tensors, broken)
        results: list[torch.Tensor | None] = []
        for name, element, dtype, shape in self._outputs:
            if shape is None:
                binding.bind_output(name, self.device, self.index)
                results.append(None)
                continue
            out = torch.empty(shape, dtype=dtype, device=where)
            if out.numel():
                binding.bind_output(name, self.device, self.index, element, shape, out.data_ptr())
            else:  # an empty tensor has no address, and ONNX Runtime wants one
                binding.bind_output(name, self.device, self.index)
            results.append(out)
        if self._computed:
            binding.bind_output(OUTPUT, "cpu")
        try:
            self._run_bound(binding)
        except Exception as error:
            if not isinstance(error, self._refusal) and not _names_a_value(error):
                raise
            return self._left(tensors, f"ONNX Runtime refuses it: {first_line(error)}")
        result = binding.get_outputs() if self._some_unknown or self._computed else []
        if self._computed:
            broken = self._broken(result[-1].numpy(), tensors)
            if broken is not None:
                return self._left(tensors, broken)
        if self._some_unknown:
            results = [self._as_torch(result[i]) if out is None else out for i, out in enumerate(results)]
        return tuple(results)  # type: ignore[arg-type]

    def _as_torch(self, value: Any) -> torch.Tensor:
        tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(value._ortvalue.to_dlpack())
        # DLPack says uint8
        return tensor.view(torch.bool) if value.data_type() == "tensor(bool)" else tensor

    def _run_bound(self, binding: Any) -> None:
        self._session.run_with_iobinding(binding)


def _names_a_value(error: Exception) -> bool:
    """Whether a layer refused its inputs; a bound run has no separate type of error for that."""
    text = str(error)
    return (
        isinstance(error, RuntimeError)
        and "Non-zero status code returned while running" in text
        and "allocate" not in text
    )


def _element_type(dtype: torch.dtype) -> Any:
    return torch.empty(0, dtype=dtype).numpy().dtype.type if _numpy_has(dtype) else _ONNX_TYPES[dtype]


def _numpy_has(dtype: torch.dtype) -> bool:
    return _ONNX_TYPES.get(dtype, 0) < _FIRST_UNKNOWN_TO_NUMPY


# Weights that a model names but does not hold, listed in a few bytes after it.
#
# Messages of protobuf that are written one after the other are read as one: a model without weights, and a
# list of what they are and where they lie, written where the model is loaded. So neither the `onnx` package
# is imported, nor does a model that came from elsewhere choose which files are read.

# Numbers of fields in onnx.proto.
_MODEL_GRAPH, _GRAPH_INITIALIZER = 7, 5
_DIMS, _DATA_TYPE, _NAME, _EXTERNAL_DATA, _DATA_LOCATION = 1, 2, 8, 13, 14
_KEY, _VALUE = 1, 2
_EXTERNAL = 1
# Before this key comes its length, 8, or, if that is written at greater length than it needs, a zero.
_LOCATION = re.compile(rb"[\x00\x08]location")


def names_files(model: Any) -> bool:
    """Whether a model may name files itself, or places in memory, which ONNX Runtime would read.

    The bytes show it: an external tensor has an entry `location`. (Something else of just that name
    is taken for one too.)
    """
    return _LOCATION.search(model) is not None


def without_weights(proto: Any, weights: Collection[str]) -> bytes:
    """The model as a file that lacks these weights."""
    copy = type(proto)()
    copy.CopyFrom(proto)
    remaining = [tensor for tensor in copy.graph.initializer if tensor.name not in weights]
    del copy.graph.initializer[:]
    copy.graph.initializer.extend(remaining)
    return bytes(copy.SerializeToString(deterministic=True))


def named_weights(weights: Mapping[str, torch.Tensor], places: Mapping[str, int], file: str) -> bytes:
    """The bytes to write after a model so that it has these weights: in the file, or given to its session."""
    return b"".join(
        _field(_MODEL_GRAPH, _field(_GRAPH_INITIALIZER, _tensor(name, tensor, places.get(name), file)))
        for name, tensor in weights.items()
    )


def _tensor(name: str, tensor: torch.Tensor, place: int | None, file: str) -> bytes:
    number = _ONNX_TYPES.get(tensor.dtype)
    if number is None:
        raise EngineError(f"the weight {name} is of {tensor.dtype}, which ONNX has not")
    where = {
        "location": name if place is None else file,
        "offset": str(place or 0),
        "length": str(tensor.nbytes),
    }
    return b"".join(
        [
            *(_number(_DIMS, size) for size in tensor.shape),
            _number(_DATA_TYPE, number),
            _field(_NAME, name.encode()),
            *(
                _field(_EXTERNAL_DATA, _text(_KEY, key) + _text(_VALUE, value))
                for key, value in where.items()
            ),
            _number(_DATA_LOCATION, _EXTERNAL),
        ]
    )


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _text(field: int, value: str) -> bytes:
    return _field(field, value.encode(errors="surrogateescape"))


def _field(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    result = bytearray()
    while value >= 0x80:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)


# An ONNX file, whoever wrote it, as ONNX Runtime runs it on the CPU.


_CPU = ["CPUExecutionProvider"]


class OnnxFile:
    """A session, with its inputs in the order of the file."""

    def __init__(self, path: Path) -> None:
        import onnxruntime as ort

        self._path = path
        try:
            self._session = ort.InferenceSession(path, providers=_CPU)
        except Exception as error:  # ONNX Runtime raises classes of its own
            raise EngineError(f"ONNX Runtime cannot load {path}: {first_line(error)}") from error
        self.inputs: list[str] = [item.name for item in self._session.get_inputs()]

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
