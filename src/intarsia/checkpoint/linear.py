"""Linear layers whose weights have the bits and the names of a checkpoint.

The dense weight exists only inside `forward`, some rows of it at a time: integers are unpacked by shifts and
masks, zero points are subtracted, and scales are multiplied.

    layout            integers                           zero points                     scales
    pack-quantized    weight_packed int32 (N, K / each)  weight_zero_point int32         weight_scale
                                                         (N / each, groups)              (N, groups)
    int-, float-,     weight int8 or float8 (N, K)       weight_zero_point int8          weight_scale
    naive-quantized                                      (N, groups)                     (N, groups)
    AWQ               qweight int32 (K, N / 8)           qzeros int32 (groups, N / 8)    scales (groups, N)
    GPTQ              qweight int32 (K / each, N)        qzeros int32 (groups, N / each) scales (groups, N)

N are outputs, K inputs, and `each` is the number of integers in an int32. The first is in the lowest bits;
AWQ's columns are in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from intarsia.errors import InputError
from intarsia.quantized import linear_by_rows


@dataclass(frozen=True)
class Rounding:
    """The rounding of inputs to 8 bits before a product, as in compressed-tensors."""

    is_float: bool
    dynamic: bool  # by a scale that each call computes; otherwise by one in the checkpoint
    by_token: bool
    symmetric: bool

    def dynamic_scale(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The scale for these values, and the zero point of asymmetric rounding."""
        # compressed-tensors 0.20 has one scale for all tokens of an input of two dimensions. Other packages
        # have one for each token, whatever the shape.
        dims = [-1] if self.by_token else list(range(x.dim()))
        low = x.amin(dims, keepdim=True).clamp(max=0)
        high = x.amax(dims, keepdim=True).clamp(min=0)
        least, most = self._ends()
        span = torch.maximum(-low, high) * 2 if self.symmetric else high - low
        scale = span / (most - least)
        scale = torch.where(scale == 0, torch.finfo(x.dtype).eps, scale)
        return scale, None if self.symmetric else (least - low / scale).clamp(least, most).round()

    def rounded(self, x: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """The values of inputs after rounding."""
        units = x / scale if zero is None else x / scale + zero.to(x.dtype)
        units = units.clamp(*self._ends())
        units = units.to(torch.float8_e4m3fn).to(x.dtype) if self.is_float else units.round()
        return (units if zero is None else units - zero.to(x.dtype)) * scale

    def _ends(self) -> tuple[float, float]:
        most = torch.finfo(torch.float8_e4m3fn).max
        return (-most, most) if self.is_float else (-128.0, 127.0)


class QuantizedLinear(nn.Module):
    """A linear layer that dequantizes its weight from its buffers."""

    def __init__(self, linear: nn.Linear, bits: int, group: int, names: Collection[str]) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bits, self.group = bits, group
        self.dtype = linear.weight.dtype
        self.bias = linear.bias
        if "bias" in names and linear.bias is None:  # GPTQ's oldest checkpoints have a bias in every layer
            self._declare("bias", (self.out_features,))
        self._takes(names)

    def _takes(self, names: Collection[str]) -> None:
        """Declare the buffers for tensors of these names in a checkpoint."""
        raise NotImplementedError

    def dequantized(self, rows: slice | None = None) -> Tensor:
        """The dense weight, (outputs, inputs), or rows of it, whose bounds are multiples of 16."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return linear_by_rows(x, self.dequantized, self.bias, self.out_features, self.in_features)

    def settle(self, name: str) -> None:
        """Check and prepare the tensors after they were read."""

    def extra_repr(self) -> str:
        sizes = f"{self.in_features} inputs, {self.out_features} outputs"
        return f"{sizes}, {self.bits} bits in groups of {self.group}"

    @property
    def each(self) -> int:
        """The number of integers in an int32."""
        return 32 // self.bits

    @property
    def groups(self) -> int:
        return -(-self.in_features // self.group)

    def _declare(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
        self.register_buffer(name, torch.empty(shape, dtype=dtype or self.dtype))

    def _words(self, integers: int) -> int:
        return -(-integers // self.each)

    def _words_of(self, rows: slice | None) -> slice | None:
        """The words of a row's integers, where those of several rows are in one int32."""
        return None if rows is None else slice(rows.start // self.each, -(-rows.stop // self.each))

    def _divide(self) -> None:
        if self.in_features % self.group:
            raise InputError(f"groups of {self.group} do not divide its {self.in_features} inputs")


class PackedLinear(QuantizedLinear):
    """The layout `pack-quantized` of compressed-tensors."""

    weight_packed: Tensor
    weight_scale: Tensor
    weight_zero_point: Tensor
    weight_g_idx: Tensor

    def __init__(
        self,
        linear: nn.Linear,
        bits: int,
        group: int,
        names: Collection[str],
        symmetric: bool,
        one_scale: bool,
    ) -> None:
        self.symmetric, self.one_scale = symmetric, one_scale
        super().__init__(linear, bits, group, names)

    def _takes(self, names: Collection[str]) -> None:
        self._divide()
        self._declare("weight_packed", (self.out_features, self._words(self.in_features)), torch.int32)
        self._declare("weight_scale", (1,) if self.one_scale else (self.out_features, self.groups))
        if not self.symmetric:
            shape = (1,) if self.one_scale else (self._words(self.out_features), self.groups)
            self._declare("weight_zero_point", shape, torch.int8 if self.one_scale else torch.int32)
        if "weight_shape" in names:
            self._declare("weight_shape", (2,), torch.int64)
        if "weight_g_idx" in names:
            self._declare("weight_g_idx", (self.in_features,), torch.int32)

    def settle(self, name: str) -> None:
        if hasattr(self, "weight_g_idx"):
            _check_groups(f"{name}.weight_g_idx", self.weight_g_idx, self.groups)

    def dequantized(self, rows: slice | None = None) -> Tensor:
        numbers = unpacked(_part(self.weight_packed, rows), self.bits, 1)[:, : self.in_features]
        scale = _part(self.weight_scale.reshape(-1, self.groups), rows)
        zero: Tensor | float = 2 ** (self.bits - 1)
        if not self.symmetric and self.one_scale:
            zero = self.weight_zero_point.reshape(1, 1) + zero
        elif not self.symmetric:
            zero = _part(unpacked(self.weight_zero_point, self.bits, 0)[: self.out_features], rows)
        return dequantized(numbers, zero, scale, getattr(self, "weight_g_idx", None))


class PlainLinear(QuantizedLinear):
    """The layouts `int-quantized`, `float-quantized` and `naive-quantized` of compressed-tensors."""

    weight: Tensor
    weight_scale: Tensor
    weight_zero_point: Tensor
    input_scale: Tensor

    def __init__(
        self,
        linear: nn.Linear,
        group: int,
        names: Collection[str],
        symmetric: bool,
        one_scale: bool,
        is_float: bool,
        rounding: Rounding | None,
    ) -> None:
        self.symmetric, self.one_scale, self.is_float = symmetric, one_scale, is_float
        super().__init__(linear, 8, group, names)
        self.rounding = rounding
        if rounding is not None and not rounding.dynamic:
            self._declare("input_scale", (1,))
            if not rounding.symmetric:
                self._declare("input_zero_point", (1,), torch.int8)

    def _takes(self, names: Collection[str]) -> None:
        self._divide()
        dtype = torch.float8_e4m3fn if self.is_float else torch.int8
        shape = (1,) if self.one_scale else (self.out_features, self.groups)
        self._declare("weight", (self.out_features, self.in_features), dtype)
        self._declare("weight_scale", shape)
        if not self.symmetric:
            self._declare("weight_zero_point", shape, torch.int8)

    def forward(self, x: Tensor) -> Tensor:
        if self.rounding is not None and self.rounding.dynamic:
            x = self.rounding.rounded(x, *self.rounding.dynamic_scale(x))
        elif self.rounding is not None:
            x = self.rounding.rounded(x, self.input_scale, getattr(self, "input_zero_point", None))
        return super().forward(x)

    def dequantized(self, rows: slice | None = None) -> Tensor:
        zero = None if self.symmetric else _part(self.weight_zero_point.reshape(-1, self.groups), rows)
        scale = _part(self.weight_scale.reshape(-1, self.groups), rows)
        return dequantized(_part(self.weight, rows), zero, scale)


class AwqLinear(QuantizedLinear):
    """The layout `gemm` of AWQ."""

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor

    def __init__(
        self, linear: nn.Linear, bits: int, group: int, names: Collection[str], symmetric: bool
    ) -> None:
        self.symmetric = symmetric
        super().__init__(linear, bits, group, names)

    def _takes(self, names: Collection[str]) -> None:
        self._divide()
        if self.out_features % self.each:
            raise InputError(f"its {self.out_features} outputs are not a multiple of {self.each}")
        words = self._words(self.out_features)
        self._declare("qweight", (self.in_features, words), torch.int32)
        self._declare("scales", (self.groups, self.out_features))
        if not self.symmetric or "qzeros" in names:
            self._declare("qzeros", (self.groups, words), torch.int32)

    def dequantized(self, rows: slice | None = None) -> Tensor:
        words = self._words_of(rows)
        numbers = unpacked(_columns(self.qweight, words), self.bits, 1, interleaved=True)
        zero: Tensor | float = 2 ** (self.bits - 1)
        if hasattr(self, "qzeros"):
            zero = unpacked(_columns(self.qzeros, words), self.bits, 1, interleaved=True).t()
        return dequantized(numbers.t(), zero, _columns(self.scales, rows).t())


class GptqLinear(QuantizedLinear):
    """The layout of GPTQ, whose first version stores zero points minus one."""

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor

    def __init__(
        self, linear: nn.Linear, bits: int, group: int, names: Collection[str], act_order: bool, less: int
    ) -> None:
        self.indexed = act_order
        self.less = less
        super().__init__(linear, bits, group, names)

    def _takes(self, names: Collection[str]) -> None:
        for size, kind in (self.in_features, "inputs"), (self.out_features, "outputs"):
            if size % self.each:
                raise InputError(f"its {size} {kind} are not a multiple of {self.each}")
        self._declare("qweight", (self._words(self.in_features), self.out_features), torch.int32)
        self._declare("qzeros", (self.groups, self._words(self.out_features)), torch.int32)
        self._declare("scales", (self.groups, self.out_features))
        if self.indexed or "g_idx" in names:
            self._declare("g_idx", (self.in_features,), torch.int32)
        else:
            self._divide()

    def settle(self, name: str) -> None:
        if not hasattr(self, "g_idx"):
            return
        _check_groups(f"{name}.g_idx", self.g_idx, self.groups)
        usual = torch.arange(self.in_features, device=self.g_idx.device) // self.group
        # Groups of consecutive columns need no index, unless the last group is shorter.
        self.indexed = bool(self.in_features % self.group) or not torch.equal(self.g_idx, usual.int())

    def dequantized(self, rows: slice | None = None) -> Tensor:
        numbers = unpacked(_columns(self.qweight, rows), self.bits, 0)
        zero = unpacked(_columns(self.qzeros, self._words_of(rows)), self.bits, 1)
        if self.less:
            zero = (zero + self.less) & (2**self.bits - 1)
        index = self.g_idx if self.indexed else None
        return dequantized(numbers.t(), zero.t(), _columns(self.scales, rows).t(), index)


def unpacked(packed: Tensor, bits: int, dim: int, interleaved: bool = False) -> Tensor:
    """The integers that are packed in int32, along a dimension of a matrix.

    >>> unpacked(torch.tensor([[0x76543210]], dtype=torch.int32), 4, 1)
    tensor([[0, 1, 2, 3, 4, 5, 6, 7]], dtype=torch.int32)
    """
    places = torch.arange(32 // bits, dtype=torch.int32, device=packed.device)
    if interleaved:  # column 1 is at the fifth position: 0, 4, 1, 5, 2, 6, 3, 7
        places = places.reshape(2, -1).t().flatten()
    shifts = (places * bits).reshape(-1, *[1] * (1 - dim))
    integers: Tensor = (packed.unsqueeze(dim + 1) >> shifts) & (2**bits - 1)
    return integers.flatten(dim, dim + 1)


def dequantized(
    numbers: Tensor, zero: Tensor | float | None, scale: Tensor, index: Tensor | None = None
) -> Tensor:
    """`(numbers - zero) * scale`, with a zero point and a scale for each row and group of columns.

    Groups are of neighbours, or `index` says to which each column belongs.
    """
    if index is not None:
        zero = zero[:, index].to(scale.dtype) if isinstance(zero, Tensor) else zero
        weight = numbers.to(scale.dtype)
        return (weight if zero is None else weight - zero) * scale[:, index]
    weight = numbers.reshape(numbers.shape[0], scale.shape[1], -1).to(scale.dtype)
    if zero is not None:
        weight = weight - (zero.unsqueeze(2).to(scale.dtype) if isinstance(zero, Tensor) else zero)
    return (weight * scale.unsqueeze(2)).flatten(1)


def _part(tensor: Tensor, rows: slice | None) -> Tensor:
    """Rows of a tensor; a single one is for all."""
    return tensor if rows is None or len(tensor) == 1 else tensor[rows]


def _columns(tensor: Tensor, columns: slice | None) -> Tensor:
    return tensor if columns is None else tensor[:, columns]


def _check_groups(name: str, index: Tensor, groups: int) -> None:
    low, high = (int(bound) for bound in index.aminmax())
    if low < 0 or high >= groups:
        raise InputError(
            f"{name} names group {high if high >= groups else low}, and there are {groups} groups"
        )
