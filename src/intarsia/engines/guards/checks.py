"""Guards as a program looks at them: those of inputs, and those the engine computes a number for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from intarsia.engines.guards.kinds import AnyGuard, Index, Largest, NonZero, Product, Quotient, ValueGuard

_KINDS = {kind.__name__: kind for kind in (ValueGuard, Largest, NonZero, Product, Index, Quotient)}


def _none() -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.zeros(0, np.float32)


@dataclass(frozen=True)
class Checks:
    """Guards of inputs by name, and those of the last output with the most its numbers may be.

    >>> one = Checks({"x": [ValueGuard("x", 0.0, 5.0)]}, [NonZero("y")], np.array([0.5], np.float32))
    >>> again = Checks.from_json(one.as_json())
    >>> again.given == one.given, again.made == one.made, again.most
    (True, True, array([0.5], dtype=float32))
    """

    given: dict[str, list[ValueGuard]] = field(default_factory=dict)
    made: list[AnyGuard] = field(default_factory=list)
    most: np.ndarray[Any, np.dtype[np.float32]] = field(default_factory=_none)

    def as_json(self) -> dict[str, Any]:
        """Plain values, for a file."""
        return {
            "given": {name: [_to_json(guard) for guard in guards] for name, guards in self.given.items()},
            "made": [_to_json(guard) for guard in self.made],
            "most": [repr(float(most)) for most in self.most],
        }

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Checks:
        """What `as_json` wrote; LookupError, TypeError or ValueError for anything else."""
        given: dict[str, list[ValueGuard]] = {}
        for name, guards in found["given"].items():
            made = [_from_json(guard) for guard in guards]
            if not all(isinstance(guard, ValueGuard) for guard in made):
                raise ValueError(f"{name} has a guard that is none of an input")
            given[name] = [guard for guard in made if isinstance(guard, ValueGuard)]
        most = np.array([float(item) for item in found["most"]], dtype=np.float32)
        checks = Checks(given, [_from_json(guard) for guard in found["made"]], most)
        if len(checks.made) != len(most):
            raise ValueError(f"{len(checks.made)} guards have {len(most)} limits")
        return checks


def _to_json(guard: AnyGuard) -> dict[str, Any]:
    fields = {
        name: repr(value) if isinstance(value, float) else value for name, value in asdict(guard).items()
    }
    return {"kind": type(guard).__name__, **fields}  # infinity has no number in JSON


def _from_json(found: Mapping[str, Any]) -> AnyGuard:
    kind, given = _KINDS[found["kind"]], {name: value for name, value in found.items() if name != "kind"}
    if kind is Index:
        return Index(str(given["tensor"]), str(given["data"]), tuple(int(axis) for axis in given["axes"]))
    if kind is ValueGuard:
        low, high = float(given["low"]), float(given["high"])
        return ValueGuard(str(given["tensor"]), low, high, bool(given["total"]))
    if kind is Largest:
        return Largest(str(given["tensor"]), float(given["high"]), bool(given["signed"]))
    if kind is Product:
        return Product(str(given["one"]), str(given["other"]), float(given["high"]))
    if kind is NonZero:
        return NonZero(str(given["tensor"]))
    return Quotient(str(given["tensor"]), str(given["divisor"]))
