"""The context of a converter: what it can read besides its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from intarsia.errors import ConversionError
from intarsia.network import Network, Tensor, dtypes
from intarsia.network import functional as F


@dataclass
class ConversionContext:
    """The network under construction, the current node, and the result that torch expects of it."""

    net: Network
    node: fx.Node | None = None
    name: str = ""
    notes: list[str] = field(default_factory=list)  # what a user should know of how nodes were converted
    for_engine: Any = None
    reads_engine: bool = False  # whether a converter asked for it; trial conversions are shared otherwise

    @property
    def engine(self) -> Any:
        """The engine that the network is built for; None if it is built for no engine."""
        self.reads_engine = True
        return self.for_engine

    @property
    def settings(self) -> Mapping[str, Any]:
        """The options of that engine by name, such as `precision` of `OpenVINO(precision="bf16")`."""
        engine = self.engine
        return {f.name: getattr(engine, f.name) for f in fields(engine)} if is_dataclass(engine) else {}

    @property
    def value(self) -> Any:
        """The fake tensor (or tuple of them) of the node's result: torch's own dtype and shape."""
        return None if self.node is None else self.node.meta.get("val")

    @property
    def operator(self) -> str:
        """The name of the node's operator without its overload (`max_pool2d`), for converters of several."""
        target = None if self.node is None else self.node.target
        if not isinstance(target, torch._ops.OpOverload):
            raise ConversionError(f"{self.name} is not a call of an operator")
        return str(target.overloadpacket.__name__)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the (first) result in torch."""
        value = self.value
        first = value[0] if isinstance(value, list | tuple) else value
        if not isinstance(first, torch.Tensor):
            raise ConversionError(f"{self.name} makes no tensor")
        return first.dtype

    @property
    def dtype(self) -> ir.DataType:
        """The same as an ONNX type."""
        return dtypes.to_onnx(self.torch_dtype)

    def tensor(self, value: Any, dtype: ir.DataType | torch.dtype | None = None) -> Tensor:
        """`value` (tensor, frozen tensor, array, scalar) as a network tensor, cast if a dtype is given."""
        if not isinstance(value, Tensor):
            return F.constant(value, dtype)
        return value if dtype is None else F.cast(value, dtype)

    def promote(self, *values: Any) -> tuple[Tensor, ...]:
        """The operands, cast to the dtype of the result."""
        return tuple(self.tensor(value, self.dtype) for value in values)

    def common(self, *values: Any) -> tuple[Tensor, ...]:
        """The operands, cast to the dtype in which torch computes; for operators such as comparisons."""
        return tuple(self.tensor(value, common_dtype(*values)) for value in values)


Context = ConversionContext  # signatures of converters are shorter by it


def common_dtype(*values: Any) -> ir.DataType:
    """torch's promotion over tensors, 0-d tensors and Python scalars."""
    stand_ins: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            shape = (1,) * value.ndim
            stand_ins.append(torch.empty(shape, dtype=dtypes.to_torch(value.dtype), device="meta"))
        else:
            stand_ins.append(value)
    result = stand_ins[0]
    if len(stand_ins) == 1:
        return dtypes.to_onnx(
            result.dtype if isinstance(result, torch.Tensor) else torch.tensor(result).dtype
        )
    dtype = torch.result_type(stand_ins[0], stand_ins[1])
    for value in stand_ins[2:]:
        dtype = torch.result_type(torch.empty((1,), dtype=dtype, device="meta"), value)
    return dtypes.to_onnx(dtype)
