"""Networks as ONNX; large weights are in the archive's own table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor

from intarsia.archive.tensors import TensorTable
from intarsia.errors import ArchiveError
from intarsia.network import Network, dtypes
from intarsia.network.serialize import to_proto

_SOURCE = "source"  # metadata of layers that is not stored, since it has paths of this machine


def network_to_onnx(net: Network, tensors: TensorTable) -> tuple[bytes, dict[str, str]]:
    """The model, and the key of each weight that it names."""
    proto, weights = to_proto(net)
    for node in proto.graph.node:
        properties = [entry for entry in node.metadata_props if entry.key != _SOURCE]
        del node.metadata_props[:]
        node.metadata_props.extend(properties)
    keys = {name: tensors.add(_as_torch(array), name) for name, array in weights.items()}
    return proto.SerializeToString(deterministic=True), keys


def _as_torch(array: ir.TensorProtocol) -> torch.Tensor:
    if isinstance(array, TorchTensor) and isinstance(array.raw, torch.Tensor):
        return array.raw.detach()
    flat = torch.frombuffer(bytearray(array.tobytes()), dtype=dtypes.to_torch(array.dtype))
    return flat.view([int(size) for size in array.shape])  # type: ignore[arg-type]


def network_from_onnx(
    data: memoryview, keys: Mapping[str, str], tensors: Mapping[str, torch.Tensor]
) -> Network:
    """The network, whose weights stay in the mapped file; ArchiveError if it refers to anything else."""
    proto = onnx.ModelProto.FromString(bytes(data))
    if proto.functions:
        raise ArchiveError("a network defines functions of its own")
    outside = {tensor.name for tensor in proto.graph.initializer if _is_outside(tensor)}
    for tensor in _tensors_of(proto.graph):
        if _is_outside(tensor) and tensor.name not in keys:
            raise ArchiveError(f"a network looks for the weight {tensor.name!r} outside the archive")
    if outside != set(keys):
        raise ArchiveError("a network names other weights than the manifest")
    graph = ir.serde.deserialize_model(proto).graph
    for name, key in keys.items():
        weight, value = tensors[key], graph.initializers[name]
        content = value.const_value
        if (
            content is None
            or content.dtype != dtypes.to_onnx(weight.dtype)
            or list(content.shape) != list(weight.shape)
        ):
            raise ArchiveError(
                f"the weight {name} does not have the type and shape that its network declares"
            )
        value.const_value = TorchTensor(weight.cpu().contiguous(), name=name)
    net = Network.of(graph)
    net.verify()
    return net


def _is_outside(tensor: Any) -> bool:
    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data)


def _tensors_of(graph: Any) -> Iterator[Any]:
    """Every tensor of a model, also in bodies and attributes."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        for attribute in node.attribute:
            yield attribute.t
            yield from attribute.tensors
            for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                yield from (sparse.values, sparse.indices)
            for body in (attribute.g, *attribute.graphs):
                yield from _tensors_of(body)
