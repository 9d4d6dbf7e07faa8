"""How a functional adds a layer: operands become tensors, shapes are inferred, the layer is appended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor

from intarsia.errors import NetworkError
from intarsia.network import dtypes
from intarsia.network.infer import infer
from intarsia.network.network import Network, Tensor, default_net
from intarsia.network.value import Shape

__all__ = ["DTypeLike", "Operand", "Scalar", "constant", "ints", "op", "opaque", "ops"]

Scalar = bool | int | float
Operand = Tensor | Scalar | np.ndarray[Any, Any] | torch.Tensor
DTypeLike = ir.DataType | torch.dtype


def as_dtype(dtype: DTypeLike) -> ir.DataType:
    return dtypes.to_onnx(dtype) if isinstance(dtype, torch.dtype) else dtype


def constant(value: Operand, dtype: DTypeLike | None = None, *, name: str | None = None) -> Tensor:
    """A constant from a scalar, list, numpy array or torch tensor. Torch tensors are not copied."""
    if isinstance(value, Tensor):
        return value
    net = default_net()
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if dtype is not None and dtypes.to_onnx(value.dtype) != as_dtype(dtype):
            value = value.to(dtypes.to_torch(as_dtype(dtype)))
        if value.numel() <= 8 and value.device.type == "cpu" and value.dtype not in _NO_NUMPY:
            return net.add_constant(ir.Tensor(value.numpy().copy()), name)
        return net.add_constant(TorchTensor(value.contiguous()), name)
    if dtype is None and isinstance(value, bool | int | float):
        dtype = dtypes.to_onnx(torch.tensor(value).dtype)
    array = np.asarray(value, order="C")
    if dtype is not None:
        array = array.astype(dtypes.to_numpy(as_dtype(dtype)))
        return net.add_constant(ir.Tensor(array, dtype=as_dtype(dtype)), name)
    return net.add_constant(ir.Tensor(array), name)


_NO_NUMPY = frozenset({torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2})


def ints(values: Sequence[int]) -> Tensor:
    """A constant vector of int64, the form in which ONNX takes axes and sizes."""
    return constant(np.asarray(list(values), dtype=np.int64))


def operands(*values: Operand | None) -> list[Tensor | None]:
    """The values as tensors; a scalar gets the dtype of the first tensor."""
    like = next((v.dtype for v in values if isinstance(v, Tensor)), None)
    tensors: list[Tensor | None] = []
    for value in values:
        if value is None or isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, bool | int | float):
            tensors.append(constant(value, like))
        else:
            tensors.append(constant(value))
    return tensors


def op(op_type: str, *inputs: Operand | None, domain: str = "", **attributes: Any) -> Tensor:
    """Add one layer with one output.

    >>> from intarsia.network import Network, Tensor, net_guard, functional as F
    >>> net = Network()
    >>> with net_guard(net):
    ...     x = Tensor("x", torch.float32, (2, 3))
    ...     F.op("Softmax", x, axis=-1)
    Tensor(softmax: f32[2, 3])
    """
    return Tensor.of(_add(op_type, inputs, 1, domain, attributes).outputs[0])


def ops(
    op_type: str, *inputs: Operand | None, outputs: int, domain: str = "", **attributes: Any
) -> tuple[Tensor, ...]:
    """Add one layer with several outputs."""
    node = _add(op_type, inputs, outputs, domain, attributes)
    return tuple(Tensor.of(value) for value in node.outputs)


def _add(
    op_type: str, inputs: Sequence[Operand | None], outputs: int, domain: str, attributes: dict[str, Any]
) -> ir.Node:
    net = default_net(*inputs)
    tensors = operands(*inputs)
    while tensors and tensors[-1] is None:
        tensors.pop()
    present = {name: value for name, value in attributes.items() if value is not None}
    types = infer(domain, op_type, tensors, present, outputs)
    values = [None if tensor is None else tensor.value for tensor in tensors]
    return net.new_node(op_type, values, present, types, domain=domain, inferred=True)


def opaque(
    domain: str,
    op_type: str,
    *inputs: Operand | None,
    makes: Sequence[tuple[DTypeLike, Shape]],
    **attributes: Any,
) -> tuple[Tensor, ...]:
    """A layer that only one engine knows, such as a plugin. `makes` is the dtype and shape of each output."""
    if not domain:
        raise NetworkError(f"an opaque layer needs a domain of its own; {op_type} was given none")
    net: Network = default_net(*inputs)
    types = [(as_dtype(dtype), tuple(shape)) for dtype, shape in makes]
    layer = net.add_layer(op_type, operands(*inputs), attributes, outputs=types, domain=domain)
    return tuple(Tensor.of(value) for value in layer.node.outputs)
