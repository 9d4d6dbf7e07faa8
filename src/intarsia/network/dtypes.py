"""The dtypes of torch, ONNX and numpy."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters

from intarsia.errors import NetworkError

DataType = ir.DataType

FLOATS = frozenset({DataType.FLOAT, DataType.DOUBLE, DataType.FLOAT16, DataType.BFLOAT16})
SIGNED = frozenset({DataType.INT8, DataType.INT16, DataType.INT32, DataType.INT64})
UNSIGNED = frozenset({DataType.UINT8, DataType.UINT16, DataType.UINT32, DataType.UINT64})
INTEGERS = SIGNED | UNSIGNED
# Integers that floats of 32 bits do not hold.
LONG = frozenset({DataType.INT32, DataType.INT64, DataType.UINT32, DataType.UINT64})


def to_onnx(dtype: torch.dtype) -> ir.DataType:
    """The ONNX type of a torch dtype. Complex and quantized dtypes have none and are refused."""
    if dtype.is_complex:
        raise NetworkError(f"{dtype} has no ONNX type")
    try:
        return tensor_adapters.from_torch_dtype(dtype)
    except TypeError:
        raise NetworkError(f"{dtype} has no ONNX type") from None


def to_torch(dtype: ir.DataType) -> torch.dtype:
    """The torch dtype of an ONNX type."""
    try:
        return tensor_adapters.to_torch_dtype(dtype)
    except TypeError:
        raise NetworkError(f"{dtype.name} has no torch dtype") from None


def to_numpy(dtype: ir.DataType) -> np.dtype:
    """The numpy dtype (ml_dtypes for bfloat16 and float8) of an ONNX type."""
    return np.dtype(dtype.numpy())
