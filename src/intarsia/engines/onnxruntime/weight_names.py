"""Weights that a model names but does not hold, listed in a few bytes after it.

Messages of protobuf that are written one after the other are read as one: a model without weights, and a
list of what they are and where they lie, written where the model is loaded. So neither the `onnx` package is
imported, nor does a model that came from elsewhere choose which files are read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch

from intarsia.errors import EngineError

# ONNX's own numbers for types; `network.dtypes` has them too, but needs `onnx_ir`.
_TYPES = {
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
    number = _TYPES.get(tensor.dtype)
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
