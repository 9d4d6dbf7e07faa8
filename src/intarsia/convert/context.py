"""The context of a converter: what it can read besides its arguments, the dtype it computes in, and types."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
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
            raise ConversionError(f"{self.name} does not return a tensor")
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


# The dtype an elementwise converter computes in: the result's own, or a wider one that engines have.

HALVES = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
NARROW = frozenset({ir.DataType.INT8, ir.DataType.INT16, ir.DataType.UINT8, ir.DataType.UINT16})


def wide(dtype: ir.DataType) -> ir.DataType:
    """Where a formula of several layers is computed: torch too computes halves in float32."""
    return ir.DataType.FLOAT if dtype in HALVES else native(dtype)


def native(dtype: ir.DataType) -> ir.DataType:
    """Where a single layer is computed: as it is, where engines have kernels that are right.

    They hardly have any for bfloat16. For narrow integers some are missing and others saturate where
    torch wraps; in int32 they are there, and the cast back wraps.
    """
    if dtype == ir.DataType.BFLOAT16:
        return ir.DataType.FLOAT
    return ir.DataType.INT32 if dtype in NARROW else dtype


def promoted_wide(ctx: ConversionContext, *values: Any) -> tuple[Tensor, ...]:
    """Operands in the dtype of the result, widened; cast what is made of them back with `narrowed`."""
    return tuple(_through(ctx, value, wide(ctx.dtype)) for value in values)


def promoted(ctx: ConversionContext, *values: Any) -> tuple[Tensor, ...]:
    """Operands in the dtype of the result for one layer; cast what it makes back with `narrowed`."""
    dtype = native(ctx.dtype)
    # torch keeps a Python scalar in float32 beside a float16 tensor: 1e6 must not become infinity.
    if dtype == ir.DataType.FLOAT16 and any(_is_lost(value) for value in values):
        dtype = ir.DataType.FLOAT
    return tuple(_through(ctx, value, dtype) for value in values)


def number(ctx: ConversionContext, value: Any, dtype: ir.DataType) -> Tensor:
    """A Python number beside tensors of the result's dtype, to compute in `dtype`: -1 is 255 in uint8."""
    if ctx.dtype in NARROW:
        value = np.asarray(value).astype(dtypes.to_numpy(ctx.dtype))
    return F.constant(value, dtype)


def narrowed(ctx: ConversionContext, result: Tensor) -> Tensor:
    """The computed value, in the dtype of the result."""
    return F.cast(result, ctx.dtype)


def _through(ctx: ConversionContext, value: Any, dtype: ir.DataType) -> Tensor:
    if not isinstance(value, Tensor):
        return number(ctx, value, dtype)
    # A float32 beside a bfloat16 is rounded before it is computed with, unless it is 0-d.
    if value.dtype != ctx.dtype and (value.ndim or ctx.dtype in NARROW):
        value = F.cast(value, ctx.dtype)
    return F.cast(value, dtype)


def _is_lost(value: Any) -> bool:
    if isinstance(value, Tensor) or value == 0 or not np.isfinite(value):
        return False
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(np.float16(value))
    return bool(abs(rounded - value) > abs(value) * 2.0**-10)


Types = tuple[type, ...]


def enforce_tensor_types(
    types: Mapping[int | str, Types], promote: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Convert arguments of a raw converter to one of the given types, by position (int) or keyword (str).

    With `promote`, a value of another type is converted to the first type that can hold it. Without it, the
    node is refused. Missing arguments and None are not changed.

    >>> @enforce_tensor_types({0: (Tensor,)})
    ... def double(ctx, target, args, kwargs, name):
    ...     return args[0] + args[0]
    """
    for key, wanted in types.items():
        if not wanted or any(t not in (Tensor, np.ndarray, torch.Tensor) for t in wanted):
            raise ConversionError(
                f"argument {key!r} must be annotated with Tensor, np.ndarray or torch.Tensor, not {wanted}"
            )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def enforced(ctx: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
            positional, named = list(args), dict(kwargs)
            for key, wanted in types.items():
                if isinstance(key, int) and key < len(positional):
                    positional[key] = _enforce(key, positional[key], wanted, promote)
                elif isinstance(key, str) and key in named:
                    named[key] = _enforce(key, named[key], wanted, promote)
            return function(ctx, target, tuple(positional), named, name)

        return enforced

    return decorate


def _enforce(key: int | str, value: Any, wanted: Types, promote: bool) -> Any:
    if value is None or isinstance(value, wanted):
        return value
    if promote:
        for kind in wanted:
            if kind is Tensor:
                return F.constant(value)
            if isinstance(value, Tensor):
                continue  # a tensor of the network has no value yet
            if kind is np.ndarray:
                return value.numpy(force=True) if isinstance(value, torch.Tensor) else np.asarray(value)
            return torch.as_tensor(value)
    names = " or ".join(kind.__name__ for kind in wanted)
    raise ConversionError(f"argument {key!r} is a {type(value).__name__}; it must be {names}")
