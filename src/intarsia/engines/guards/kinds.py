"""The kinds of guard: each says which tensors it watches, and in words what must hold of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a module that is only loaded and run does without onnx_ir, which takes long to import
    import onnx_ir as ir

# The longest dimension an input may have where sizes vary; checked at the call.
LONGEST_INPUT = 2**22


@dataclass(frozen=True)
class ValueGuard:
    """Elements of a tensor lie between two bounds, or the sum of their magnitudes is at most `high`."""

    tensor: str
    low: float
    high: float
    total: bool = False

    @property
    def tensors(self) -> tuple[str, ...]:
        return (self.tensor,)

    def __str__(self) -> str:
        if self.total:
            return f"{self.tensor} must be finite, the sum of its magnitudes at most {self.high:.4g}"
        if self.high == float("inf"):
            return f"{self.tensor} must not hold NaN"
        return f"{self.tensor} must lie between {self.low:.10g} and {self.high:.10g}"


@dataclass(frozen=True)
class Largest:
    """No element of a tensor exceeds a bound; `signed`, in magnitude. NaN is looked for by others."""

    tensor: str
    high: float
    signed: bool

    @property
    def tensors(self) -> tuple[str, ...]:
        return (self.tensor,)

    def __str__(self) -> str:
        return f"{self.tensor} must be at most {self.high:.10g}{' in magnitude' if self.signed else ''}"


@dataclass(frozen=True)
class NonZero:
    """No element of a tensor is zero."""

    tensor: str

    @property
    def tensors(self) -> tuple[str, ...]:
        return (self.tensor,)

    def __str__(self) -> str:
        return f"{self.tensor}, a divisor, must not hold 0"


@dataclass(frozen=True)
class Product:
    """The product of two tensors stays below a bound."""

    one: str
    other: str
    high: float

    @property
    def tensors(self) -> tuple[str, ...]:
        return (self.one, self.other)

    def __str__(self) -> str:
        return f"{self.one} times {self.other} must stay within {self.high:.10g}"


@dataclass(frozen=True)
class Index:
    """Elements of a tensor are indices along some axes of another, from either end."""

    tensor: str
    data: str
    axes: tuple[int, ...]

    @property
    def tensors(self) -> tuple[str, ...]:
        return (self.tensor, self.data)

    def __str__(self) -> str:
        return f"{self.tensor} must hold indices within {self.data} along {list(self.axes)}"


@dataclass(frozen=True)
class Quotient:
    """The quotient of two tensors has 24 bits at most: its remainder is found exactly."""

    tensor: str
    divisor: str

    @property
    def tensors(self) -> tuple[str, ...]:
        return (self.tensor, self.divisor)

    def __str__(self) -> str:
        return f"{self.tensor} must be finite, and less than 2**24 times {self.divisor}"


AnyGuard = ValueGuard | Largest | NonZero | Product | Index | Quotient


@dataclass
class Guards:
    """All guards of a network, and the layers that must be given other values while it runs."""

    ranges: dict[ir.Value, ValueGuard] = field(default_factory=dict)
    others: list[AnyGuard] = field(default_factory=list)
    held: dict[str, Index] = field(default_factory=dict)  # by the name of the layer's result
    divided: list[str] = field(default_factory=list)  # results of divisions by what may be denormal
    sizes: set[str] = field(default_factory=set)  # tensors made of sizes alone, which may be known by now

    def all(self) -> list[AnyGuard]:
        return [*self.ranges.values(), *self.others]
