"""A shipped pattern, with networks to test and measure it on."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir
import torch

from intarsia.network import Network, Tensor, net_guard
from intarsia.network import functional as F
from intarsia.rewrite.manager import RewritePatternManager
from intarsia.rewrite.pattern import PatternRewriter

Array = np.ndarray[Any, Any]
Make = Callable[[np.random.Generator, bool], None]
_refusals: dict[tuple[str, str, str], str | None] = {}  # by engine, its version and the pattern


class NetworkBuilder(Protocol):
    """The interface that rewriting needs of a network's engine; every `NetworkEngine` has it."""

    @property
    def name(self) -> str: ...
    @property
    def family(self) -> str: ...
    def key(self) -> str: ...
    def version(self) -> str: ...
    def patterns(self) -> Collection[str]: ...
    def probe(self, net: Network, /) -> str | None: ...
    def build(self, net: Network, /) -> Callable[..., tuple[torch.Tensor, ...]]: ...


@dataclass(frozen=True)
class Fusion:
    """A pattern under its name.

    `make(rng, large)` adds layers that the pattern matches to the network of `net_guard`: small ones for
    tests, large ones for measurements. A `free` pattern only removes layers and is always applied. Any other
    is applied if it was measured to be faster. It is only applied for engines with its `group` (see
    `NetworkEngine.patterns`). A `finite_only` pattern may change results of NaN and infinities. It is only
    applied if the user names it or all patterns.
    """

    name: str
    pattern: PatternRewriter
    make: Make
    benefit: float
    free: bool = False
    group: str = "onnx"
    finite_only: bool = False

    def sample(self, rng: np.random.Generator, large: bool = False) -> Network:
        """A network that the pattern matches."""
        net = Network(self.name)
        with net_guard(net):
            self.make(rng, large)
        return net

    def suits(self, engine: NetworkBuilder) -> bool:
        """Whether the engine declares the group of this pattern."""
        return self.group in engine.patterns()

    def refusal(self, engine: NetworkBuilder) -> str | None:
        """Why an engine refuses the layers that this pattern adds; None if it accepts them."""
        if self.free:
            return None
        key = (engine.key(), engine.version(), self.name)
        if key not in _refusals:
            _refusals[key] = self._probe(engine)
        return _refusals[key]

    def _probe(self, engine: NetworkBuilder) -> str | None:
        manager = RewritePatternManager()
        manager.add(self.name, self.pattern)
        net = self.sample(np.random.default_rng(0))
        manager.rewrite(net)
        try:
            return engine.probe(net)
        except Exception as error:  # an engine of another package may raise any error
            return f"{type(error).__name__}: {error}"


def given(name: str, *shape: int | str) -> Tensor:
    """An input of 32-bit floats."""
    return Tensor(name, ir.DataType.FLOAT, shape)


def weight(rng: np.random.Generator, *shape: int, scale: float = 0.3, shift: float = 0.0) -> Tensor:
    """A constant of random 32-bit floats."""
    values = rng.standard_normal(shape, dtype=np.float32) * np.float32(scale) + np.float32(shift)
    return F.constant(np.asarray(values, np.float32))


def scalar(tensor: Tensor | None) -> float | None:
    """The number in a constant of one element; None for any other tensor."""
    array = None if tensor is None else tensor.constant
    return None if array is None or array.size != 1 else float(np.asarray(array, np.float64).ravel()[0])


def scaled_to(array: Array, factor: float | Array) -> Array | None:
    """A constant times a factor; None if the product overflows or becomes zero."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        weight: Array = (array * factor).astype(array.dtype)
    vanishes = not weight.any() and array.any() and np.any(factor)
    return weight if np.isfinite(weight).all() and not vanishes else None


def integers(tensor: Tensor | None) -> list[int] | None:
    """The numbers in a constant of integers; None for any other tensor."""
    array = None if tensor is None else tensor.constant
    return None if array is None else [int(x) for x in np.ravel(array)]


def order_of(layer: object, rank: int) -> list[int]:
    """The permutation of a Transpose."""
    order = layer.attribute("perm")  # type: ignore[attr-defined]
    return list(reversed(range(rank))) if order is None else list(order)


def is_float(tensor: Tensor) -> bool:
    """Whether a tensor has enough digits to fold constants into it."""
    return tensor.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)
