"""The kinds of guard: which tensors each watches, what must hold of them, and how they are kept in a file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnx_ir as ir


# The longest dimension an input may have where sizes vary; checked at the call.
LONGEST_INPUT = 2**22


@dataclass(frozen=True)
class AnyGuard:
    """A condition on values; its fields that are texts are the names of the tensors."""

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(value for value in vars(self).values() if isinstance(value, str))


@dataclass(frozen=True)
class ValueGuard(AnyGuard):
    """Elements of a tensor lie between two bounds, or the sum of their magnitudes is at most `high`."""

    tensor: str
    low: float
    high: float
    total: bool = False

    def __str__(self) -> str:
        if self.total:
            return f"{self.tensor} must be finite, the sum of its magnitudes at most {self.high:.4g}"
        if self.high == float("inf"):
            return f"{self.tensor} must not hold NaN"
        return f"{self.tensor} must lie between {self.low:.10g} and {self.high:.10g}"


@dataclass(frozen=True)
class NonZero(AnyGuard):
    """No element of a tensor is zero."""

    tensor: str

    def __str__(self) -> str:
        return f"{self.tensor}, a divisor, must not hold 0"


@dataclass(frozen=True)
class Product(AnyGuard):
    """The product of two tensors stays below a bound."""

    one: str
    other: str
    high: float

    def __str__(self) -> str:
        return f"{self.one} times {self.other} must stay within {self.high:.10g}"


@dataclass(frozen=True)
class Index(AnyGuard):
    """Elements of a tensor are indices along some axes of another, from either end."""

    tensor: str
    data: str
    axes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.tensor} must hold indices within {self.data} along {list(self.axes)}"


@dataclass(frozen=True)
class Quotient(AnyGuard):
    """The quotient of two tensors has 24 bits at most: its remainder is found exactly."""

    tensor: str
    divisor: str

    def __str__(self) -> str:
        return f"{self.tensor} must be finite, and less than 2**24 times {self.divisor}"


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

    def by_input(self, inputs: Collection[str]) -> tuple[dict[str, list[ValueGuard]], list[AnyGuard]]:
        """The guards of inputs, and all others, which the engine computes a number for.

        Inputs are checked before it runs: that is cheaper than a layer, and sees all bits of int64.
        """
        by_input: dict[str, list[ValueGuard]] = {}
        others: list[AnyGuard] = []
        for guard in self.all():
            if isinstance(guard, ValueGuard) and guard.tensor in inputs:
                by_input.setdefault(guard.tensor, []).append(guard)
            else:
                others.append(guard)
        return by_input, others


# Guards as a program looks at them: those of inputs, and those the engine computes a number for.


_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (ValueGuard, NonZero, Product, Index, Quotient)}


@dataclass(frozen=True)
class Checks:
    """Guards of inputs by name, and those of the last output with the most its numbers may be.

    >>> one = Checks({"x": [ValueGuard("x", 0.0, 5.0)]}, [NonZero("y")], np.array([0.5], np.float32))
    >>> again = Checks.from_json(one.as_json())
    >>> again.inputs == one.inputs, again.computed == one.computed, again.limits
    (True, True, array([0.5], dtype=float32))
    """

    inputs: dict[str, list[ValueGuard]] = field(default_factory=dict)
    computed: list[AnyGuard] = field(default_factory=list)
    limits: np.ndarray[Any, np.dtype[np.float32]] = field(default_factory=lambda: np.zeros(0, np.float32))

    def as_json(self) -> dict[str, Any]:
        """Plain values, for a file."""
        return {
            "given": {name: [_to_json(guard) for guard in guards] for name, guards in self.inputs.items()},
            "made": [_to_json(guard) for guard in self.computed],
            "most": [repr(float(limit)) for limit in self.limits],
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Checks:
        """What `as_json` wrote; LookupError, TypeError or ValueError for anything else."""
        inputs: dict[str, list[ValueGuard]] = {}
        for name, items in values["given"].items():
            guards = [_from_json(item) for item in items]
            inputs[name] = [guard for guard in guards if isinstance(guard, ValueGuard)]
            if len(inputs[name]) < len(guards):
                raise ValueError(f"{name} has a guard that is not on an input")
        computed = [_from_json(item) for item in values["made"]]
        limits = np.array([float(item) for item in values["most"]], dtype=np.float32)
        if len(computed) != len(limits):
            raise ValueError(f"{len(computed)} guards have {len(limits)} limits")
        return Checks(inputs, computed, limits)


def _to_json(guard: AnyGuard) -> dict[str, Any]:
    fields = {
        name: repr(value) if isinstance(value, float) else value for name, value in asdict(guard).items()
    }
    return {"kind": type(guard).__name__, **fields}  # infinity has no number in JSON


_READERS: dict[str, Callable[[Any], Any]] = {
    "str": str,
    "float": float,
    "bool": bool,
    "tuple[int, ...]": lambda axes: tuple(map(int, axes)),
}


def _from_json(item: Mapping[str, Any]) -> AnyGuard:
    kind = _KINDS[item["kind"]]
    guard: AnyGuard = kind(**{f.name: _READERS[str(f.type)](item[f.name]) for f in fields(kind)})
    return guard
