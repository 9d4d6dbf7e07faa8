"""The table of torch's dtypes and ONNX's."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch

from intarsia.errors import NetworkError

DataType = ir.DataType

_TORCH_TO_ONNX: dict[torch.dtype, ir.DataType] = {
    torch.float32: ir.DataType.FLOAT,
    torch.float64: ir.DataType.DOUBLE,
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
    torch.int8: ir.DataType.INT8,
    torch.int16: ir.DataType.INT16,
    torch.int32: ir.DataType.INT32,
    torch.int64: ir.DataType.INT64,
    torch.uint8: ir.DataType.UINT8,
    torch.uint16: ir.DataType.UINT16,
    torch.uint32: ir.DataType.UINT32,
    torch.uint64: ir.DataType.UINT64,
    torch.bool: ir.DataType.BOOL,
    torch.float8_e4m3fn: ir.DataType.FLOAT8E4M3FN,
    torch.float8_e4m3fnuz: ir.DataType.FLOAT8E4M3FNUZ,
    torch.float8_e5m2: ir.DataType.FLOAT8E5M2,
    torch.float8_e5m2fnuz: ir.DataType.FLOAT8E5M2FNUZ,
}
_ONNX_TO_TORCH = {onnx: dtype for dtype, onnx in _TORCH_TO_ONNX.items()}

FLOATS = frozenset({DataType.FLOAT, DataType.DOUBLE, DataType.FLOAT16, DataType.BFLOAT16})
SIGNED = frozenset({DataType.INT8, DataType.INT16, DataType.INT32, DataType.INT64})
UNSIGNED = frozenset({DataType.UINT8, DataType.UINT16, DataType.UINT32, DataType.UINT64})
INTEGERS = SIGNED | UNSIGNED


def to_onnx(dtype: torch.dtype) -> ir.DataType:
    """The ONNX type of a torch dtype. Complex and quantized dtypes have none and are refused."""
    onnx_dtype = _TORCH_TO_ONNX.get(dtype)
    if onnx_dtype is None:
        raise NetworkError(f"{dtype} has no ONNX type")
    return onnx_dtype


def to_torch(dtype: ir.DataType) -> torch.dtype:
    """The torch dtype of an ONNX type."""
    torch_dtype = _ONNX_TO_TORCH.get(dtype)
    if torch_dtype is None:
        raise NetworkError(f"{dtype.name} has no torch dtype")
    return torch_dtype


def to_numpy(dtype: ir.DataType) -> np.dtype:
    """The numpy dtype (ml_dtypes for bfloat16 and float8) of an ONNX type."""
    return np.dtype(dtype.numpy())
