"""A network as an ONNX model: small constants inside, large weights left where they are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
from onnx_ir.tensor_adapters import TorchTensor

from intarsia.network.network import Network

IR_VERSION = 11
INLINE_BYTES = 1024  # engines read shapes and axes while they build: those must be inside

# (location, offset) under which an engine finds a weight of this name and tensor.
Locate = Callable[[str, ir.TensorProtocol], tuple[str, int]]

_serializing = threading.Lock()


def to_bytes(net: Network, locate: Locate | None = None) -> tuple[bytes, dict[str, ir.TensorProtocol]]:
    """The model as bytes, and the weights it only points to; without `locate` all weights are inside."""
    outside: dict[str, ir.TensorProtocol] = {}
    # The pointers are put in for the time of serialising only; the network itself keeps its tensors.
    with _serializing:
        try:
            for name, value in net.graph.initializers.items():
                array = value.const_value
                if locate is None or array is None or array.nbytes <= INLINE_BYTES:
                    continue
                location, offset = locate(name, array)
                outside[name] = array
                value.const_value = ir.ExternalTensor(
                    location, offset, array.nbytes, array.dtype, shape=ir.Shape(array.shape), name=name
                )
            proto = ir.serde.serialize_model(ir.Model(net.graph, ir_version=IR_VERSION))
        finally:
            for name, array in outside.items():
                net.graph.initializers[name].const_value = array
    return proto.SerializeToString(), outside


def save(net: Network, path: str | Path) -> None:
    """Write the network as `.onnx` (weights beside it, above 2 GB), for Netron or any ONNX reader."""
    model = ir.Model(net.graph, ir_version=IR_VERSION, producer_name="intarsia")
    total = sum(v.const_value.nbytes for v in net.graph.initializers.values() if v.const_value is not None)
    if total < 2**31 - 2**20:
        ir.save(model, path)
    else:
        ir.save(model, path, external_data=f"{Path(path).name}.data")


def address_of(array: ir.TensorProtocol) -> tuple[int, object]:
    """Where the bytes of a constant lie, and the object that keeps them there."""
    if isinstance(array, TorchTensor):
        tensor = array.raw
        return tensor.data_ptr(), tensor
    data = array.numpy()
    return data.ctypes.data, data
